"""The trace that the leader of a parity run writes, and the comparison of other frameworks with it.

Errors of arrays are ‖a − reference‖ / ‖reference‖.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from hvdkit.core.session import Gradients
from hvdkit.core.state import is_statistic
from hvdkit.files import unwritable
from hvdkit.worker.deviation import is_weight

Arrays = Mapping[str, np.ndarray]
INCOMPARABLE = 1e300  # the error where a value is NaN or infinite; JSON cannot represent infinity


@dataclass(frozen=True)
class Part:
    """The request to a rank: the folder of the trace, the number of steps, and whether this rank leads.

    `precision` is the recipe's key: a rank that follows in `fp32` is compared with the trace in float64 all the same.
    """

    folder: Path
    steps: int
    leads: bool
    precision: str = "fp64"

    def probe(self, batch: int) -> Path:
        """The file with a batch's logits, loss and gradients at the initial weights, in float64."""
        return self.folder / f"probe-{batch}.safetensors"

    @property
    def figures(self) -> Path:
        """The file with the leader's numbers (`Figures`)."""
        return self.folder / "leader.json"

    def state(self, step: int) -> Path:
        """The file with the complete state after `step` steps."""
        return self.folder / f"state-{step:04}.safetensors"

    def findings(self, framework: str) -> Path:
        """The file with a framework's findings."""
        return self.folder / f"{framework}{'' if self.precision == 'fp64' else '-' + self.precision}.json"


@dataclass
class Figures:
    """The leader's numbers: SHA-256 of each rank's batches, losses by step (means over all ranks), and evaluation.

    `logits_f32` and `gradients_f32` (by batch and parameter) are the errors of the leader's own float32 results.
    """

    batches: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    logits_f32: float = 0.0
    gradients_f32: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def error(got: np.ndarray, reference: np.ndarray) -> float:
    """‖got − reference‖ / ‖reference‖ in float64; ‖got‖ if the reference is zero. INCOMPARABLE for NaN or infinity."""
    reference = reference.astype(np.float64)
    size = float(np.linalg.norm(reference))
    distance = float(np.linalg.norm(got.astype(np.float64) - reference))
    found = distance / size if size else distance
    return found if np.isfinite(found) else INCOMPARABLE


def errors(got: Arrays, reference: Arrays) -> dict[str, float]:
    """Errors by tensor, in the reference's order; INCOMPARABLE for a tensor that only one side has."""
    names = [*reference, *(name for name in got if name not in reference)]
    return {
        name: error(got[name], reference[name]) if name in got and name in reference else INCOMPARABLE for name in names
    }


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write tensors to a file. Raises RunError if it cannot be written."""
    # not ascontiguousarray, which turns a scalar array into shape (1,)
    content = save({name: np.asarray(array, order="C") for name, array in arrays.items()})
    try:
        path.write_bytes(content)
    except OSError as error:
        raise unwritable(path, error, "or choose fewer --steps") from error


def named(gradients: Gradients) -> dict[str, np.ndarray]:
    """The arrays of a probe file."""
    values = {f"own.{name}": value for name, value in gradients.own.items()}
    values |= {f"averaged.{name}": value for name, value in gradients.averaged.items()}
    return values | {"logits": gradients.outputs, "loss": np.asarray(gradients.loss)}


def unnamed(arrays: Arrays) -> Gradients:
    """The inverse of `named`."""

    def under(start: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(start): value for name, value in arrays.items() if name.startswith(start)}

    return Gradients(arrays["logits"], float(arrays["loss"]), under("own."), under("averaged."))


def buffers(state: Arrays) -> dict[str, np.ndarray]:
    """The running statistics in a state."""
    return {name: value for name, value in state.items() if is_statistic(name)}


def weights(state: Arrays) -> dict[str, np.ndarray]:
    """The parameters in a state."""
    return {name: value for name, value in state.items() if is_weight(name)}


def same(left: Arrays, right: Arrays) -> bool:
    """Whether both have the same tensors, bit for bit."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and left[name].tobytes() == right[name].tobytes() for name in left
    )
