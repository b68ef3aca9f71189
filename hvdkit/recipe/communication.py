"""The recipe's `compression`, `sync` and `parallel` sections; `hvdkit/recipe/schema.py` has the others.

Formulas and their sources: docs/reference/compression.md and `hvdkit/strategies/codecs/`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

from hvdkit.recipe.data import AutoOr, Strict, by_value

_FEEDBACK = "add what was not sent to the next gradient"


class Compression(Strict):
    """Base of all methods; `compression.method` chooses one of the classes below. A name alone means its defaults."""

    method: str

    def __str__(self) -> str:
        """The method, and in parentheses the values that are not defaults."""
        changed = {key: value for key, value in self.model_dump(exclude_defaults=True).items() if key != "method"}
        return self.method + (f" ({', '.join(f'{key} {value}' for key, value in changed.items())})" if changed else "")


class Uncompressed(Compression):
    """Gradients without compression."""

    method: Literal["none"] = "none"


class HalfPrecision(Compression):
    """Gradients rounded to float16 and summed in float16. Values beyond 65,504 become infinite."""

    method: Literal["fp16"] = "fp16"


class BrainFloat(Compression):
    """Gradients rounded to bfloat16, summed in their own precision after an alltoall, and rounded again."""

    method: Literal["bf16"] = "bf16"
    error_feedback: bool = Field(False, description=_FEEDBACK)


class Int8(Compression):
    """Eight bits per value and a scale per bucket, with unbiased stochastic rounding (Alistarh et al. 2017)."""

    method: Literal["int8"] = "int8"
    bucket_mib: float = Field(1 / 128, gt=0, le=1024, description="size of the gradients that share a scale")
    error_feedback: bool = Field(False, description=_FEEDBACK)


class TopK(Compression):
    """Sends the share `ratio` of each bucket's values, the largest in absolute value, with their indices.

    The values not sent are added to the next gradient (error feedback; Stich et al. 2018). With `momentum_correction`
    each rank applies momentum and clipping itself, before it selects values (Lin et al. 2018). Over `warmup_epochs` the
    ratio decreases to its value.
    """

    method: Literal["topk"] = "topk"
    ratio: float = Field(0.01, gt=0, le=1, description="share of the values that is sent")
    bucket_mib: float = Field(4.0, gt=0, le=1024, description="size of the gradients among which values are chosen")
    error_feedback: bool = Field(True, description=_FEEDBACK)
    momentum_correction: bool = Field(False, description="each rank applies momentum before values are chosen")
    warmup_epochs: int = Field(0, ge=0, le=100_000, description="epochs over which the ratio decreases to its value")

    @model_validator(mode="after")
    def _correction_needs_feedback(self) -> TopK:
        if self.momentum_correction and not self.error_feedback:
            raise ValueError("expected error_feedback true where momentum_correction is true, got error_feedback false")
        return self


class PowerSgd(Compression):
    """Low-rank approximation of each gradient (Vogels et al. 2019); small gradients are sent as they are."""

    method: Literal["powersgd"] = "powersgd"
    rank: int = Field(2, ge=1, le=1024, description="rank of the matrices that are sent in place of a gradient")
    error_feedback: bool = Field(True, description=_FEEDBACK)


_Any = Uncompressed | HalfPrecision | BrainFloat | Int8 | TopK | PowerSgd
METHODS: dict[str, type[Compression]] = by_value("method", get_args(_Any))
# Methods that an allreduce can sum, so that every `allreduce` algorithm works.
SUMMED = ("none", "fp16", "powersgd")


def _named(value: Any) -> Any:
    return {"method": value} if isinstance(value, str) else value


AnyCompression = Annotated[_Any, Discriminator("method"), BeforeValidator(_named)]


class Outer(Strict):
    """The outer optimizer, applied to the mean of the ranks' differences: SGD with Nesterov momentum (DiLoCo)."""

    method: Literal["nesterov"] = "nesterov"
    learning_rate: float = Field(0.7, gt=0, le=1e3, description="factor of the mean difference")
    momentum: float = Field(0.9, ge=0, lt=1, description="share of the last velocity that is kept")


def _outer(value: Any) -> Any:
    return None if value == "none" else _named(value)


class Sync(Strict):
    """Local SGD: ranks make `every` updates by their own gradients, then average their weights.

    Local updates start at epoch `start` (post-local SGD, Lin et al. 2020); before it, every update uses the mean
    gradient. With `outer` the mean difference since the last synchronization is the gradient of an outer optimizer
    (Douillard et al. 2023).
    """

    every: int = Field(ge=1, le=2**31, description="updates between two synchronizations")
    start: float = Field(0.0, ge=0, le=100_000, description="epochs before the first update that ranks take alone")
    outer: Annotated[Outer | None, BeforeValidator(_outer)] = Field(
        None, description="optimizer for the mean difference since the last synchronization"
    )


def _split(value: Any) -> Any:
    """One fault, not one for each alternative."""
    if value != "auto" and not (isinstance(value, list) and all(type(each) is int and each > 0 for each in value)):
        raise PydanticCustomError("split", "expected 'auto' or how many blocks each stage has, such as [3, 3, 2]")
    return value


def _costs(value: Any) -> Any:
    """One fault, not one for each alternative."""
    times = value if isinstance(value, list) else []
    if value != "counted" and not (times and all(type(ms) in (int, float) for ms in times)):
        raise PydanticCustomError("costs", "expected 'counted' or each block's milliseconds")
    return value


_Axis = Annotated[Literal["auto"] | int, AutoOr(1, 2**20)]


class Parallel(Strict):
    """The axes along which ranks divide a run: data × pipeline × tensor = the number of ranks.

    Each of `data` copies of the model reads other samples. A copy is a pipeline of stages, each of which has some of
    its blocks, and each stage is divided into `tensor` parts of its layers (docs/parallelism.md).
    """

    data: _Axis = Field("auto", description="copies of the model; auto: the number of ranks over pipeline × tensor")
    pipeline: int = Field(1, ge=1, le=2**20, description="stages of a copy")
    tensor: int = Field(1, ge=1, le=2**20, description="ranks among which each layer of a stage is divided")
    microbatches: _Axis = Field("auto", description="equal parts of a batch; auto: up to 4 for each stage")
    schedule: Literal["gpipe", "1f1b", "interleaved"] = Field("1f1b", description="the order of a stage's passes")
    chunks: int = Field(1, ge=1, le=2**20, description="runs of blocks that each stage has; for interleaved")
    split: Annotated[Literal["auto"] | list[int], BeforeValidator(_split)] = Field(
        "auto", description="how many blocks each stage has; auto: so that a step takes the least time or memory"
    )
    optimize: Literal["speed", "memory"] = Field("speed", description="what split: auto makes the least of a step")
    costs: Annotated[Literal["counted"] | list[Annotated[float, Field(gt=0, le=1e9)]], BeforeValidator(_costs)] = Field(
        "counted",
        description="what a block takes, for split: auto: counted operations, or these milliseconds of a microbatch, "
        "forward and backward",
    )

    @model_validator(mode="after")
    def _keys_go_together(self) -> Parallel:
        stages = self.pipeline
        for key in ("microbatches", "schedule", "chunks", "split", "optimize", "costs"):
            got = getattr(self, key)
            if stages == 1 and got != type(self).model_fields[key].default:
                raise ValueError(f"expected {key} only where pipeline is above 1, got {got} and pipeline 1")
        if self.microbatches != "auto" and self.microbatches < stages:
            raise ValueError(
                f"expected at least as many microbatches as pipeline has stages, got {self.microbatches} and {stages}: "
                "some stages would always wait"
            )
        if (self.schedule == "interleaved") != (self.chunks > 1):
            expected = "chunks of 2 or more where schedule is interleaved, and 1 elsewhere"
            raise ValueError(f"expected {expected}, got {self.chunks} and {self.schedule}")
        if self.chunks > 1 and self.microbatches != "auto" and self.microbatches % stages:
            raise ValueError(
                f"expected a multiple of pipeline, {stages}, of microbatches where schedule is interleaved, got "
                f"{self.microbatches}"
            )
        if self.split != "auto" and len(self.split) != self.runs:
            raise ValueError(
                f"expected {self.runs} numbers of blocks in split, one a stage{' and chunk' * (self.chunks > 1)}, got "
                f"{self.split}"
            )
        return self

    @property
    def runs(self) -> int:
        """The number of runs of blocks that the chain is cut into: run n is a chunk of stage n modulo `pipeline`."""
        return self.pipeline * self.chunks

    @property
    def model(self) -> int:
        """The number of ranks that have one copy of the model together."""
        return self.pipeline * self.tensor

    @property
    def divides(self) -> bool:
        """Whether a copy of the model is divided over ranks."""
        return self.model > 1
