"""Why a framework's results differ from the reference: the first tensor that deviates, and the likely cause.

The first training step is checked in the order of computation. Each batch norm's running mean depends on its input, so
the buffers show at which layer the forward pass starts to differ. The ratio of the computed to the expected values then
distinguishes a wrong constant from a wrong formula.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hvdkit.core.session import Gradients
from hvdkit.core.state import is_statistic
from hvdkit.recipe.schema import Recipe
from hvdkit.tasks.image_classification import cross_entropy
from hvdkit.tasks.task import Architecture

Arrays = Mapping[str, np.ndarray]
TOLERANCE = 1e-9  # in float64; correct frameworks are a thousand times closer, and every known fault is far beyond


@dataclass(frozen=True)
class Deviation:
    """The first tensor that deviates, and the likely cause."""

    tensor: str
    cause: str


@dataclass(frozen=True)
class Evidence:
    """A framework's first steps and the reference's. Pairs are (got, expected), all float64.

    `initial` and `after` are the complete states before and after the first update, whose learning rate is `rate`.
    `applied` and `forced` (one entry for each teacher-forced step) are errors by tensor. `eval_logits` is one error,
    and so is `evaluation` (the larger one of the logits' and the loss's). `targets` belong to the batch of
    `gradients`.
    """

    recipe: Recipe
    architecture: Architecture
    rate: float
    targets: np.ndarray
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
    checks: list[Callable[[Evidence], Deviation | None]] = [
        _input,
        _forward,
        _statistics,
        _loss,
        _backward,
        _average,
        _update,
        _later_steps,
        _evaluation,
    ]
    return next((found for check in checks if (found := check(evidence))), None)


def _input(evidence: Evidence) -> Deviation | None:
    if not evidence.batches_equal:
        return Deviation("inputs and targets", "the data: their order, shuffling or scaling")
    got, expected = evidence.initial
    for name in expected:
        if name not in got or got[name].tobytes() != expected[name].tobytes():
            return Deviation(name, "the initial weights, or the layout in which they are loaded")
    return None


def _forward(evidence: Evidence) -> Deviation | None:
    got, expected = evidence.gradients
    if _close(got.outputs, expected.outputs):
        return None
    before = "the inputs"
    if next(evidence.architecture.normalized_layers(), None) is None:
        return Deviation("logits", "the forward pass: the order of layers, an activation, a mask, a scale, an epsilon")
    for layer in evidence.architecture.normalized_layers():
        mean = f"{layer.norm}.running_mean"
        if mean in evidence.after[1] and not _close(evidence.after[0][mean], evidence.after[1][mean]):
            if layer.cause:
                return Deviation(mean, layer.cause)
            if before == "the inputs":
                return Deviation(mean, f"{layer.name}: its layout or padding, or the layout of the inputs")
            return Deviation(
                mean, f"what comes between {before} and {layer.name}: batch norm's epsilon, or the activation"
            )
        before = layer.norm
    return Deviation("logits", f"what follows {before}: its epsilon, the pooling or the last layer")


def _statistics(evidence: Evidence) -> Deviation | None:
    """The logits are right, so the update of the running statistics is wrong."""
    start, (got, expected) = evidence.initial[1], evidence.after
    momentum = evidence.architecture.norm_momentum
    for _, norm, _ in evidence.architecture.normalized_layers():
        for name in (f"{norm}.running_mean", f"{norm}.running_var"):
            if name not in expected or _close(got[name], expected[name]):
                continue
            share = _ratio(got[name] - start[name], expected[name] - start[name])
            if name.endswith("_var") and _close(got[f"{norm}.running_mean"], expected[f"{norm}.running_mean"]):
                return Deviation(name, "the running variance: expected the unbiased one, of n - 1 values")
            if share is not None:
                kept = 1 - share * (1 - momentum)
                return Deviation(name, f"batch norm's momentum: it keeps {kept:.6g} of the old, expected {momentum}")
            return Deviation(name, "how batch norm updates its running statistics")
    return None


def _loss(evidence: Evidence) -> Deviation | None:
    got, expected = evidence.gradients
    if abs(got.loss - expected.loss) <= TOLERANCE * abs(expected.loss):
        return None
    differs = Deviation("loss", f"the loss function: {got.loss:.9g}, expected {expected.loss:.9g}")
    if evidence.recipe.loss.counts:
        return differs
    labels, classes = evidence.targets.reshape(-1), expected.outputs.shape[-1]
    plain = cross_entropy(expected.outputs, labels).mean()
    even = np.mean([cross_entropy(expected.outputs, np.full(len(labels), label)).mean() for label in range(classes)])
    asked = evidence.recipe.loss.label_smoothing
    smoothing = (got.loss - plain) / (even - plain)
    if 0 <= round(smoothing, 9) < 1:
        return Deviation("loss", f"label smoothing: it is as if it were {smoothing:.6g}, expected {asked:g}")
    return differs


def _backward(evidence: Evidence) -> Deviation | None:
    got, expected = evidence.gradients
    for name in reversed(list(evidence.architecture.parameter_shapes())):
        if not _close(got.own[name], expected.own[name]):
            return Deviation(f"gradient of {name}", "the backward pass of this layer, or a gradient scaled on its way")
    return None


def _average(evidence: Evidence) -> Deviation | None:
    for name, error in evidence.applied.items():
        if error > TOLERANCE:
            return Deviation(f"averaged gradient of {name}", "the average over the ranks: expected their mean")
    return None


def _update(evidence: Evidence) -> Deviation | None:
    """The gradients are right, so the optimizer is not."""
    start, (got, expected) = evidence.initial[1], evidence.after
    wrong = [name for name in expected if is_weight(name) and not _close(got[name], expected[name])]
    for name in wrong:
        if all(expected[each].ndim < 2 for each in wrong):
            return Deviation(name, "weight decay of biases and norms: the others are right")
        share = _ratio(got[name] - start[name], expected[name] - start[name])
        if share is not None:
            return Deviation(name, f"the learning rate: the update is {share:.6g} times the expected one")
        return Deviation(name, "the optimizer's update: its weight decay or momentum")
    return _slots(evidence)


def _slots(evidence: Evidence) -> Deviation | None:
    got, expected = evidence.after
    for name in expected:
        if name.startswith("optimizer.") and not _close(got[name], expected[name]):
            share = _ratio(got[name], expected[name])
            if share is not None and abs(share - evidence.rate) < 1e-6 * evidence.rate:
                return Deviation(
                    name, f"the learning rate is inside the momentum: it is {share:.6g} times the expected one"
                )
            return Deviation(name, "what the optimizer keeps from step to step")
    return None


def _later_steps(evidence: Evidence) -> Deviation | None:
    for step, errors in enumerate(evidence.forced):
        worst = max(errors, key=lambda name: errors[name])
        if errors[worst] > TOLERANCE:
            return Deviation(
                f"{worst} after step {step + 1}", "what the optimizer makes of its slots, or of a new rate"
            )
    return None


def _evaluation(evidence: Evidence) -> Deviation | None:
    if evidence.eval_logits > TOLERANCE:
        return Deviation(
            "logits in evaluation", "batch norm in evaluation: epsilon, or how running statistics are used"
        )
    if evidence.evaluation > TOLERANCE:
        return Deviation(
            "evaluation", "the average over ranks of unequal shares: expected (sum of sums) / (sum of counts)"
        )
    return None


def _close(got: np.ndarray, expected: np.ndarray) -> bool:
    size = float(np.linalg.norm(expected))
    return bool(np.linalg.norm(got - expected) <= TOLERANCE * (size or 1.0))


def _ratio(got: np.ndarray, expected: np.ndarray) -> float | None:
    """The factor c with `got` = c × `expected`; None if there is none."""
    size = float(np.sum(expected * expected))
    if size == 0:
        return None
    ratio = float(np.sum(got * expected)) / size
    return ratio if np.linalg.norm(got - ratio * expected) <= 1e-6 * np.linalg.norm(got) else None
