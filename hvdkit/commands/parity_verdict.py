"""When a framework's findings pass `hvdkit parity`: the limits of each error, in float64 and in float32."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from hvdkit.results.parity import MARKS, FrameworkParity
from hvdkit.worker.parity_trace import INCOMPARABLE

Batches = list[dict[str, float]]  # of each, errors by parameter

# Float32 may be so many times as far from float64 as the reference's own. Where a model has batch norms, and the
# framework's adds up one value after the other, their statistics alone are so far off (docs/parity.md shows it).
F32_FACTOR, F32_FACTOR_PLAIN_SUMS = 3.0, 50.0
# What trains in float32 alone may be F32_FACTOR times as far from float64, tensor by tensor, as the reference trained
# in float32, or as far as this: a hundred times its rounding, for sums in another order.
F32_FLOOR = 1e-5
# Of a gradient with such an error in the reference's own float32, in each batch, nothing but rounding is left: a bias
# before a batch norm has one that is almost zero. It counts in float64 alone.
F32_NO_DIGITS = 1e-2


def compared(own: Batches, reference: Batches) -> tuple[dict[str, float], dict[str, float]]:
    """The two batches by which gradients in float32 are compared, one of each side's, with those that float32 resolves.

    Rounding may flip a sign before a ReLU, which makes the error of that batch ten thousand times as large; in a few
    batches that happens by chance. So either the worst batches of both sides are compared or the best ones, whichever
    errors are closer: the worst where flips are common, the best where they are rare.
    """
    resolved = {name for batch in reference for name, error in batch.items() if not error > F32_NO_DIGITS}

    def of_resolved(batch: dict[str, float]) -> dict[str, float]:
        return {name: error for name, error in batch.items() if name in resolved or not resolved}

    def size(batch: dict[str, float]) -> float:
        return _worst(batch)[1]

    own, reference = list(map(of_resolved, own)), list(map(of_resolved, reference))
    worst, best = ((pick(own, key=size), pick(reference, key=size)) for pick in (max, min))
    if size(worst[0]) >= INCOMPARABLE:
        return worst
    return min(worst, best, key=lambda pair: size(pair[0]) / max(size(pair[1]), sys.float_info.min))


def excess(error: Any, single: Any) -> float:
    """The largest error in float32 over its limit; errors are numbers, or lists or dictionaries of such."""
    if isinstance(error, dict):
        return max((excess(inner, single.get(key, 0.0)) for key, inner in error.items()), default=0.0)
    if isinstance(error, list):
        return max((excess(*pair) for pair in zip(error, single, strict=True)), default=0.0)
    return float(error / max(F32_FLOOR, F32_FACTOR * single))


def _excesses(finding: Mapping[str, Any], single: Mapping[str, Any]) -> dict[str, float]:
    entries = {key: "step_tensors_f64" if key == "step_f64" else key for key in MARKS}
    return {key: excess(finding[entry], single[entry]) for key, entry in entries.items()}


def verdict(finding: Mapping[str, Any], single: Mapping[str, Any] | None) -> FrameworkParity:
    """What the ranks of a framework have measured, by the limits; `single` is of the reference trained in float32."""
    worst = {key: _worst(finding[key]) for key in ("gradients_f64", "applied_f64", "buffers_f64", "weights_f64")}
    own_f32, reference_f32 = compared(finding["gradients_f32"], finding["reference_gradients_f32"])
    same = (
        *("batches_equal", "initial_weights_equal", "logits_f64", "evaluation_f64"),
        *("logits_f32", "reference_logits_f32", "first_deviation", "likely_cause"),
    )
    judged = FrameworkParity(
        passed=True,
        missed=[],
        f32_factor=F32_FACTOR if finding["exact_sums"] or not finding["buffers_f64"] else F32_FACTOR_PLAIN_SUMS,
        version=finding["versions"]["framework"],
        **{key: finding[key] for key in same},
        **{key: error for key, (_, error) in worst.items()},
        losses_f64=max(finding["losses_f64"]),
        step_f64=max(finding["step_f64"]),
        gradients_f32=_worst(own_f32)[1],
        reference_gradients_f32=_worst(reference_f32)[1],
        worst_gradient=worst["gradients_f64"][0],
        worst_buffer=worst["buffers_f64"][0],
        worst_weight=worst["weights_f64"][0],
        worst_step=1 + finding["step_f64"].index(max(finding["step_f64"])),
        gradient_errors_f64=finding["gradients_f64"],
        gradient_errors_f32=own_f32,
        reference_gradient_errors_f32=reference_f32,
        step_errors_f64=finding["step_f64"],
        evaluation_correct=finding["correct"],
        evaluation_total=finding["total"],
        f32_excess=_excesses(finding, single) if single and finding["precision"] == "fp32" else None,
    )
    beyond = missed(judged)
    return judged.model_copy(update={"passed": not beyond, "missed": beyond})


def missed(parity: FrameworkParity) -> list[str]:
    """The figures beyond their limits, by key."""
    found = [key for key in ("batches_equal", "initial_weights_equal") if not getattr(parity, key)]
    if parity.f32_excess is not None:
        found += [key for key in MARKS if not parity.f32_excess[key] <= 1.0]
    else:
        found += [key for key in MARKS if not getattr(parity, key) <= MARKS[key]]
    for key in ("logits_f32", "gradients_f32"):
        if not getattr(parity, key) <= parity.f32_factor * getattr(parity, f"reference_{key}"):
            found.append(key)
    return found


def _worst(errors: Mapping[str, float]) -> tuple[str, float]:
    """The tensor with the largest error, and that error."""
    name = max(errors, key=lambda tensor: errors[tensor], default="")
    return name, errors.get(name, 0.0)
