"""Where a framework's results differ from the reference: the first tensor that deviates, and what of a step it tells.

The first training step is checked in the order of computation. Each batch norm's running mean depends on its input, so
the buffers show at which layer the forward pass starts to differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from hvdkit.core.session import Gradients
from hvdkit.core.state import is_statistic
from hvdkit.tasks.task import Architecture

Arrays = Mapping[str, np.ndarray]
TOLERANCE = 1e-9  # in float64; correct frameworks are a thousand times closer, and every known fault is far beyond


@dataclass(frozen=True)
class Deviation:
    """A tensor that deviates, and what of the training step it tells about."""

    tensor: str
    cause: str


@dataclass(frozen=True)
class Evidence:
    """A framework's first steps and the reference's. Pairs are (got, expected), all float64.

    `initial` and `after` are the complete states before and after the first update. `applied` and `forced` (one entry
    for each teacher-forced step) are errors by tensor. `eval_logits` is one error, and so is `evaluation` (the larger
    one of the logits' and the loss's).
    """

    architecture: Architecture
    batches_equal: bool
    initial: tuple[Arrays, Arrays]
    gradients: tuple[Gradients, Gradients]
    applied: Mapping[str, float]
    after: tuple[Arrays, Arrays]
    forced: list[dict[str, float]]
    eval_logits: float
    evaluation: float


def is_weight(name: str) -> bool:
    """Whether a tensor of a state is trained."""
    return not is_statistic(name) and not name.startswith("optimizer.")


def first_deviation(evidence: Evidence) -> Deviation | None:
    """The first deviation in the order of computation; None if everything agrees to TOLERANCE."""
    return next((Deviation(tensor, cause) for tensor, cause in _deviations(evidence)), None)


def _deviations(evidence: Evidence) -> Iterator[tuple[str, str]]:
    """All tensors that deviate, in the order of computation, each with the part of the step that it tells about."""
    if not evidence.batches_equal:
        yield "inputs and targets", "the data: their order, shuffling or scaling"
    got, expected = evidence.initial
    for name in expected:
        if name not in got or got[name].tobytes() != expected[name].tobytes():
            yield name, "the initial weights, or the layout in which they are loaded"

    mine, reference = evidence.gradients
    state, expected = evidence.after
    if not _close(mine.outputs, reference.outputs):
        for layer, norm in evidence.architecture.normalized_layers():
            mean = f"{norm}.running_mean"
            if mean in expected and not _close(state[mean], expected[mean]):
                yield mean, f"{layer}, its padding or layout, or the batch norm (its epsilon) or activation before it"
        yield "logits", "the forward pass: the order of layers, an activation, a mask, a scale, an epsilon"
    for name in filter(is_statistic, expected):
        if not _close(state[name], expected[name]):
            yield name, "how batch norm updates its running statistics: its momentum, or the unbiased variance"
    if not abs(mine.loss - reference.loss) <= TOLERANCE * abs(reference.loss):
        yield "loss", f"the loss function or its label smoothing: {mine.loss:.9g}, expected {reference.loss:.9g}"
    for name in reversed(list(evidence.architecture.parameter_shapes())):
        if not _close(mine.own[name], reference.own[name]):
            yield f"gradient of {name}", "the backward pass of this layer, or a gradient scaled on its way"
    for name, error in evidence.applied.items():
        if not error <= TOLERANCE:
            yield f"averaged gradient of {name}", "the average over the ranks: expected their mean"
    for name in filter(is_weight, expected):
        if not _close(state[name], expected[name]):
            yield name, "the optimizer's update of it: its weight decay, momentum or learning rate"
    for name in expected:
        if name.startswith("optimizer.") and not _close(state[name], expected[name]):
            yield name, "what the optimizer keeps from step to step, such as a learning rate inside the momentum"

    for step, errors in enumerate(evidence.forced, start=1):
        worst = max(errors, key=lambda name: errors[name])
        if not errors[worst] <= TOLERANCE:
            yield f"{worst} after step {step}", "what the optimizer makes of its slots, or of a new rate"
    if not evidence.eval_logits <= TOLERANCE:
        yield "logits in evaluation", "batch norm in evaluation: epsilon, or how running statistics are used"
    if not evidence.evaluation <= TOLERANCE:
        yield "evaluation", "the average over ranks of unequal shares: expected (sum of sums) / (sum of counts)"


def _close(got: np.ndarray, expected: np.ndarray) -> bool:
    size = float(np.linalg.norm(expected))
    return bool(np.linalg.norm(got - expected) <= TOLERANCE * (size or 1.0))
