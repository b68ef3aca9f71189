"""The dtypes of each `precision`, and dynamic loss scaling for float16."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.core.group import Topology
from hvdkit.core.seam import Adapter
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Recipe


@dataclass(frozen=True)
class Precision:
    """`parameters` is the dtype of weights, gradients, buffers and slots; `compute` of convolutions and activations.

    Both are NumPy's names. Batch-norm statistics, the last layer and the loss stay in the dtype of the parameters.
    """

    parameters: str
    compute: str

    @property
    def scales_loss(self) -> bool:
        """Whether the loss is scaled, so that gradients do not underflow."""
        return self.compute == "float16"


PRECISIONS = {
    "fp32": Precision("float32", "float32"),
    "fp64": Precision("float64", "float64"),
    "bf16": Precision("float32", "bfloat16"),
    "fp16": Precision("float32", "float16"),
}


@dataclass(frozen=True)
class LossScaling:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2), with the constants of PyTorch's GradScaler.

    Scaled gradients are reduced first and then checked: an infinity on one rank reaches every rank through the sum, so
    all ranks skip the same step and change their scale in the same way.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000  # steps without overflow before the scale grows


LOSS_SCALING = LossScaling()


def unsupported(framework: str, capabilities: frozenset[str], recipe: Recipe, device: str) -> list[str]:
    """Error lines for what the recipe needs and a framework with these capabilities cannot do on `cpu` or `gpu`."""
    found = []
    if not _supports(recipe.precision, capabilities, device):
        able = [name for name in PRECISIONS if _supports(name, capabilities, device)]
        found.append(
            f"precision: {framework} cannot train in {recipe.precision} on a {device}; "
            f"expected one of {', '.join(able)}"
        )
    if recipe.recompute and "recompute" not in capabilities:
        found.append(f"recompute: {framework} cannot compute activations again in backward; expected false")
    return found + _sharding(framework, capabilities, recipe)


def _sharding(framework: str, capabilities: frozenset[str], recipe: Recipe) -> list[str]:
    asked, able = recipe.sharding, ["none", "optimizer"]
    able += [each for each in ("gradients", "parameters") if f"shard-{each}" in capabilities]
    if asked in able:
        return []
    why = (
        "it does not free parameters between their uses"
        if asked == "parameters"
        else "its gradients are all in memory at once"
    )
    return [f"sharding: {framework} cannot shard {asked}, as {why}; expected one of {', '.join(able)}"]


def check_can(adapter: Adapter, recipe: Recipe, topology: Topology) -> None:
    """Check that the framework supports the recipe on this rank's device. Raises RequestError."""
    found = unsupported(adapter.NAME, adapter.CAPABILITIES, recipe, topology.device)
    if found:
        raise RequestError("\n".join(found))


def _supports(precision: str, capabilities: frozenset[str], device: str) -> bool:
    if precision == "fp32":
        return True
    return (precision if device == "cpu" or precision == "fp64" else f"gpu-{precision}") in capabilities
