"""Times by batch size: from a profile at each size to one profile with curves, and the affine fit of such curves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hvdkit.profiling.layers import backward_times
from hvdkit.results.batch_times import BatchFit, BatchTime
from hvdkit.results.profile import Profile, compute_ms

Floats = NDArray[np.float64]


def combined(own: Profile, others: Sequence[Profile]) -> Profile:
    """The profile `own` with times of `others`, of the same recipe at other batch sizes, and fits over all of them."""
    batches = [_times(own, profile) for profile in sorted([own, *others], key=lambda profile: profile.batch_size)]
    if not all(batch.layer_forward_ms for batch in batches):
        batches = [batch.model_copy(update={"layer_forward_ms": []}) for batch in batches]
    sizes = [batch.batch_size for batch in batches]
    forward = np.array([batch.layer_forward_ms or [np.nan] * len(own.layers) for batch in batches])
    backward = [backward_times(own.tensors, batch.tensor_ready_ms) for batch in batches]
    layers = [
        layer.model_copy(
            update={
                "forward_fit": None if np.isnan(times).any() else fit(sizes, times),
                "backward_fit": fit(sizes, [times.get(layer.name, 0.0) for times in backward]),
            }
        )
        for layer, times in zip(own.layers, forward.T, strict=True)
    ]
    return own.model_copy(update={"batches": batches, "layers": layers})


def affine(sizes: ArrayLike, times: ArrayLike) -> tuple[Floats, Floats]:
    """Least squares of times, shape (sizes, curves), by fixed + slope × size, neither of them negative.

    Returns both, shape (curves,).
    """
    at, of = np.asarray(sizes, np.float64)[:, None], np.asarray(times, np.float64)
    middle, mean = at.mean(), of.mean(axis=0)
    slope = np.maximum(0.0, ((at - middle) * (of - mean)).sum(axis=0) / ((at - middle) ** 2).sum())
    through_zero = (at * of).sum(axis=0) / (at**2).sum()
    slope = np.where(slope * middle > mean, through_zero, slope)
    return np.maximum(0.0, mean - slope * middle), slope


def fit(sizes: Sequence[int], times_ms: ArrayLike) -> BatchFit:
    """The affine fit of one curve, and the root mean square of what it leaves."""
    times = np.asarray(times_ms, np.float64)
    fixed, slope = (float(column[0]) for column in affine(sizes, times[:, None]))
    left, mean = fixed + slope * np.array(sizes) - times, float(times.mean())
    residual = 100 * float(np.sqrt(np.mean(left**2))) / mean if mean else 0.0
    return BatchFit(fixed_ms=fixed, per_sample_ms=slope, residual_percent=residual)


def _times(own: Profile, other: Profile) -> BatchTime:
    """What is kept of the profile of another batch size, in the order of the layers and gradients of `own`.

    A gradient that is ready before the one before it in that order counts as ready together with it.
    """
    layers = {layer.name: layer.forward_ms for layer in other.layers}
    forward = [layers.get(layer.name) for layer in own.layers]
    ready = {tensor.name: tensor.ready_ms for tensor in other.tensors}
    return BatchTime(
        batch_size=other.batch_size,
        compute_ms=compute_ms(other),
        backward_ms=other.step.backward_ms.mean if other.step.backward_ms else None,
        layer_forward_ms=[ms for ms in forward if ms is not None] if None not in forward else [],
        tensor_ready_ms=np.maximum.accumulate([ready[tensor.name] for tensor in own.tensors]).tolist(),
    )
