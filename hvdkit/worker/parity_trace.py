"""What the leader of a parity run leaves for those that follow, and how theirs is held against it.

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
from hvdkit.errors import RunError
from hvdkit.worker.deviation import is_weight

Arrays = Mapping[str, np.ndarray]
INCOMPARABLE = 1e300  # of what is not even a number: JSON knows no infinity


@dataclass(frozen=True)
class Part:
    """What a rank is asked for: into which folder, how many steps, and whether it leads."""

    folder: Path
    steps: int
    leads: bool

    def probe(self, batch: int) -> Path:
        """What a batch makes of the initial weights, in float64."""
        return self.folder / f"probe-{batch}.safetensors"

    @property
    def figures(self) -> Path:
        """The leader's numbers that are no tensors."""
        return self.folder / "leader.json"

    def state(self, step: int) -> Path:
        """The whole state after so many steps."""
        return self.folder / f"state-{step:04}.safetensors"

    def findings(self, framework: str) -> Path:
        """What a follower has found."""
        return self.folder / f"{framework}.json"


@dataclass
class Figures:
    """What is compared as it is: SHA-256 of the batches by rank, losses by step (means over all ranks), evaluation.

    `logits_f32` and `gradients_f32` (by batch and parameter) are errors of the leader's own float32.
    """

    batches: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    logits_f32: float = 0.0
    gradients_f32: list[dict[str, float]] = field(default_factory=list)
    correct: int = 0
    total: int = 0
    val_loss: float = 0.0


def error(got: np.ndarray, reference: np.ndarray) -> float:
    """‖got − reference‖ / ‖reference‖ in float64; where the reference is all zeros, ‖got‖. INCOMPARABLE for NaN."""
    reference = reference.astype(np.float64)
    size = float(np.linalg.norm(reference))
    apart = float(np.linalg.norm(got.astype(np.float64) - reference))
    found = apart / size if size else apart
    return found if np.isfinite(found) else INCOMPARABLE


def errors(got: Arrays, reference: Arrays) -> dict[str, float]:
    """By tensor, in the reference's order; one that is missing on either side has INCOMPARABLE."""
    names = [*reference, *(name for name in got if name not in reference)]
    return {
        name: error(got[name], reference[name]) if name in got and name in reference else INCOMPARABLE for name in names
    }


def save_arrays(path: Path, arrays: Arrays) -> None:
    """Write tensors. Raises RunError where the disk is full."""
    # not ascontiguousarray, which gives an array without dimensions one
    content = save({name: np.asarray(array, order="C") for name, array in arrays.items()})
    try:
        path.write_bytes(content)
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); free space or choose fewer --steps") from error


def named(gradients: Gradients) -> dict[str, np.ndarray]:
    """What a batch makes of weights, as a file holds it."""
    values = {f"own.{name}": value for name, value in gradients.own.items()}
    values |= {f"averaged.{name}": value for name, value in gradients.averaged.items()}
    return values | {"logits": gradients.logits, "loss": np.asarray(gradients.loss)}


def unnamed(arrays: Arrays) -> Gradients:
    """The same from a file's content."""

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
    """Whether both have the same tensors, bit by bit."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and left[name].tobytes() == right[name].tobytes() for name in left
    )
