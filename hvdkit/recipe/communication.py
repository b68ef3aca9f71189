"""The recipe's `compression` and `sync`: what is sent, and how often. `hvdkit/recipe/schema.py` has the rest.

Formulas and their sources: docs/compression.md and `hvdkit/strategies/codecs/`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from hvdkit.recipe.data import Strict


class Compression(Strict):
    """What all methods have; `compression.method` chooses one of the classes below. A name alone is its defaults."""

    method: str

    def __str__(self) -> str:
        """The method, and in brackets what is not left at its default."""
        said = {key: value for key, value in self.model_dump(exclude_defaults=True).items() if key != "method"}
        return self.method + (f" ({', '.join(f'{key} {value}' for key, value in said.items())})" if said else "")


class Uncompressed(Compression):
    """Gradients as they are."""

    method: Literal["none"] = "none"


class HalfPrecision(Compression):
    """Gradients rounded to float16, which are summed as such. Values beyond 65,504 become infinite."""

    method: Literal["fp16"] = "fp16"


class BrainFloat(Compression):
    """Gradients rounded to bfloat16, summed in their own precision by an all-to-all, and rounded again."""

    method: Literal["bf16"] = "bf16"
    error_feedback: bool = False


class Int8(Compression):
    """Eight bits a value and a scale a bucket, rounded by chance so that the mean stays (Alistarh et al. 2017)."""

    method: Literal["int8"] = "int8"
    bucket_mib: float = Field(1 / 128, gt=0, le=1024, description="of gradients that share a scale")
    error_feedback: bool = False


class TopK(Compression):
    """The share `ratio` of each bucket's values, those largest in size, with their places; the rest waits.

    What is not sent is added to the next gradient (error feedback; Stich et al. 2018). With `momentum_correction` the
    momentum is each rank's own, before values are chosen, and clipping too (Lin et al. 2018). The ratio falls to its
    value over `warmup_epochs`.
    """

    method: Literal["topk"] = "topk"
    ratio: float = Field(0.01, gt=0, le=1)
    bucket_mib: float = Field(4.0, gt=0, le=1024, description="of gradients among which values are chosen")
    error_feedback: bool = True
    momentum_correction: bool = False
    warmup_epochs: int = Field(0, ge=0, le=100_000)

    @model_validator(mode="after")
    def _correction_needs_feedback(self) -> TopK:
        if self.momentum_correction and not self.error_feedback:
            raise ValueError("expected error_feedback true where momentum_correction is true, got error_feedback false")
        return self


class PowerSgd(Compression):
    """Each gradient as the product of two thin matrices of this rank (Vogels et al. 2019); small ones as they are."""

    method: Literal["powersgd"] = "powersgd"
    rank: int = Field(2, ge=1, le=1024)
    error_feedback: bool = True


METHODS: dict[str, type[Compression]] = {
    "none": Uncompressed,
    "fp16": HalfPrecision,
    "bf16": BrainFloat,
    "int8": Int8,
    "topk": TopK,
    "powersgd": PowerSgd,
}
# Those whose means are sums of what ranks send, so that any way of adding up serves.
SUMMED = ("none", "fp16", "powersgd")


def _named(value: Any) -> Any:
    return {"method": value} if isinstance(value, str) else value


def _method(value: Any) -> str | None:
    """Which method a mapping asks for; None where it names none."""
    name = value.get("method") if isinstance(value, dict) else getattr(value, "method", None)
    return name if name is None or isinstance(name, str) else repr(name)


AnyCompression = Annotated[
    Annotated[Uncompressed, Tag("none")]
    | Annotated[HalfPrecision, Tag("fp16")]
    | Annotated[BrainFloat, Tag("bf16")]
    | Annotated[Int8, Tag("int8")]
    | Annotated[TopK, Tag("topk")]
    | Annotated[PowerSgd, Tag("powersgd")],
    Discriminator(_method),
    BeforeValidator(_named),
]


class Outer(Strict):
    """The step that is taken by the mean of the ranks' differences: SGD with Nesterov's momentum (DiLoCo)."""

    method: Literal["nesterov"] = "nesterov"
    learning_rate: float = Field(0.7, gt=0, le=1e3)
    momentum: float = Field(0.9, ge=0, lt=1)


def _outer(value: Any) -> Any:
    if value == "none":
        return None
    return {"method": value} if isinstance(value, str) else value


class Sync(Strict):
    """Local SGD: ranks take `every` updates by their own gradients, then their weights become their mean.

    From epoch `start` on (post-local SGD, Lin et al. 2020); before it, every update is by the mean gradient. With
    `outer` the mean difference since the last meeting is a gradient to an optimizer of its own (Douillard et al. 2023).
    """

    every: int = Field(ge=1, le=2**31, description="updates between two meetings")
    start: float = Field(0.0, ge=0, le=100_000, description="epochs before the first update that ranks take alone")
    outer: Annotated[Outer | None, BeforeValidator(_outer)] = None


def faults(recipe: Any) -> list[str]:
    """What of a `Recipe`'s communication does not go together, each told by its key."""
    found = []
    compression, sync, optimizer = recipe.compression, recipe.sync, recipe.optimizer
    if isinstance(compression, TopK):
        if compression.warmup_epochs > recipe.epochs:
            found.append(
                f"compression.warmup_epochs: expected at most the recipe's {recipe.epochs} epochs, "
                f"got {compression.warmup_epochs}"
            )
        if compression.momentum_correction:
            found += _correction_faults(optimizer, sync)
    if sync is not None and recipe.precision == "fp16":
        found.append(
            "sync: expected precision fp32, fp64 or bf16, got fp16, whose ranks skip a step together or not at all"
        )
    if recipe.allreduce != "ring":
        if compression.method not in SUMMED:
            found.append(
                f"allreduce: {recipe.allreduce} adds up, which {compression.method} does not; expected ring, "
                f"or compression {', '.join(SUMMED)}"
            )
        if recipe.elastic is not None:
            found.append(f"allreduce: expected ring where elastic is given, got {recipe.allreduce}")
    return found


def _correction_faults(optimizer: Any, sync: Sync | None) -> list[str]:
    found = []
    momentum, nesterov = getattr(optimizer, "momentum", 0.0), getattr(optimizer, "nesterov", False)
    if optimizer.name != "sgd" or not momentum or nesterov:
        what = f"{optimizer.name}{' with nesterov' if nesterov else '' if momentum else ' without momentum'}"
        found.append(f"compression.momentum_correction: expected optimizer sgd with plain momentum, got {what}")
    if sync is not None:
        found.append("compression.momentum_correction: expected no sync, as differences of weights have no momentum")
    return found
