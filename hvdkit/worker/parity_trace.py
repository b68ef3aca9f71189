"""The trace that the leader of a parity run writes, and the comparison of other frameworks with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from hvdkit.core.session import Gradients
from hvdkit.files import unwritable

Arrays = Mapping[str, np.ndarray]
Errors = Mapping[str, float]
INCOMPARABLE = 1e300  # the error where a value is NaN or infinite; JSON cannot represent infinity
TOLERANCE = 1e-9  # in float64; correct frameworks are a thousand times closer, and every known fault is far beyond


@dataclass(frozen=True)
class ParityPart:
    """The request to a rank: the folder of the trace, the number of steps, and whether this rank leads.

    `precision` is the recipe's key: a rank that follows in `fp32` is compared with the trace in float64 all the same.
    """

    folder: Path
    steps: int
    leads: bool
    precision: str = "fp64"

    def findings(self, framework: str) -> Path:
        """The file with a framework's findings."""
        return self.folder / f"{framework}{'' if self.precision == 'fp64' else '-' + self.precision}.json"


@dataclass
class LeaderNumbers:
    """The leader's numbers: SHA-256 of each rank's batches, losses by step (means over all ranks), and evaluation.

    `order` has the names of the parameters from the model's input to its output.
    `logits_f32` and `gradients_f32` (by batch and parameter) are the errors of the leader's own float32 results.
    """

    batches: list[str]
    order: list[str]
    losses: list[float] = field(default_factory=list)
    logits_f32: float = 0.0
    gradients_f32: list[dict[str, float]] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)


def error(got: Any, reference: Any, least: float = 0.0) -> float:
    """‖got − reference‖ / ‖reference‖ in float64; ‖got‖ if the reference is zero. INCOMPARABLE for NaN or infinity.

    Of a reference that is smaller than `least` that is taken in place of its size.
    """
    expected = np.asarray(reference, np.float64)
    size = max(least, float(np.linalg.norm(expected)))
    distance = float(np.linalg.norm(np.asarray(got, np.float64) - expected))
    relative = distance / size if size else distance
    return relative if np.isfinite(relative) else INCOMPARABLE


def errors(got: Arrays, reference: Arrays, least: float = 0.0) -> dict[str, float]:
    """Errors by tensor, `least` as above, in the reference's order; INCOMPARABLE for a tensor of one side alone."""
    names = [*reference, *(name for name in got if name not in reference)]
    return {
        name: error(got[name], reference[name], least) if name in got and name in reference else INCOMPARABLE
        for name in names
    }


def unequal(got: Arrays, reference: Arrays) -> list[str]:
    """The tensors that are not equal bit for bit, in the dtype of `got`."""
    return [
        name
        for name in {**reference, **got}
        if name not in got
        or name not in reference
        or got[name].tobytes() != reference[name].astype(got[name].dtype).tobytes()
    ]


def first_deviation(
    findings: Mapping[str, Any], initial: list[str], after: Errors, norms: list[str]
) -> tuple[str | None, str | None]:
    """The first tensor that deviates in the order of computation, and the part of a step that it is the result of.

    `findings` has the errors, `initial` the initial tensors that are `unequal`, `after` the errors of the whole state
    after the first step. Each batch norm's running mean depends on its input, so those of `norms`,
    in forward order, show at which layer the forward pass starts to differ.
    """
    for part, of_part in _parts(findings, initial, after, norms):
        for name, value in of_part.items():
            if not value <= TOLERANCE:
                return name, part
    return None, None


def _parts(
    findings: Mapping[str, Any], initial: list[str], after: Errors, norms: list[str]
) -> Iterator[tuple[str, Errors]]:
    """The parts of the first steps in the order of computation, each with the errors of its results."""
    outputs, logits, means = findings["outputs"], findings["logits_f64"], [f"{norm}.running_mean" for norm in norms]
    gradients = reversed(findings["gradients_f64"].items())
    worst = [max(step.items(), key=lambda item: item[1]) for step in findings["step_tensors_f64"]]
    yield "the data: their order, shuffling or scaling", {"inputs and targets": float(not findings["batches_equal"])}
    yield "the initial weights, or the layout in which they are loaded", dict.fromkeys(initial, INCOMPARABLE)
    if not logits <= TOLERANCE:
        yield "the forward pass up to this layer", {name: after[name] for name in means if name in after}
    yield "the forward pass", {outputs: logits}
    yield "the update of running statistics", findings["buffers_f64"]
    yield "the loss function", {"loss": findings["losses_f64"][0]}
    yield "the backward pass down to this layer", {f"gradient of {name}": value for name, value in gradients}
    applied = findings["applied_f64"].items()
    yield "the average over ranks", {f"averaged gradient of {name}": value for name, value in applied}
    yield "the optimizer's update", findings["weights_f64"]
    yield "what the optimizer keeps", {name: value for name, value in after.items() if name.startswith("optimizer.")}
    yield "the optimizer's later updates", {f"{name} after step {n}": value for n, (name, value) in enumerate(worst, 1)}
    yield "the model in evaluation", {f"{outputs} in evaluation": findings["evaluation_logits"]}
    yield "the average of metrics over ranks", {"evaluation": findings["evaluation_f64"]}


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
    return {f"own.{name}": value for name, value in gradients.own.items()} | {"logits": gradients.outputs}


def own(probe: Arrays) -> dict[str, np.ndarray]:
    """The gradients of a probe file."""
    return {name.removeprefix("own."): value for name, value in probe.items() if name.startswith("own.")}
