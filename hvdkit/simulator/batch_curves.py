"""How long the parts of forward and backward take by batch size, from a few sizes that were measured.

Between two measured sizes each part is interpolated. Beyond them it continues along its affine fit, but below the
smallest it falls no faster than in proportion to the batch. So a layer that is bound by its kernels' launches stays as
long, while one that is bound by arithmetic grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hvdkit.profiling.batch_curves import affine
from hvdkit.results.profile import Profile
from hvdkit.simulator.piecewise_linear import Floats, not_falling


@dataclass(frozen=True, eq=False)
class ComputeTimes:
    """Forward and backward of an update, in seconds.

    `forward`, shape (layers,), and `segments`, shape (tensors,), as in a `Workload`; `tail_s` is what backward does
    after the last gradient, `earlier_s` all work of the batches before the last one.
    """

    forward: Floats
    segments: Floats
    tail_s: float
    earlier_s: float

    @cached_property
    def forward_s(self) -> float:
        """Forward of one batch."""
        return float(self.forward.sum())

    @cached_property
    def backward_s(self) -> float:
        """Backward of one batch."""
        return float(self.segments.sum()) + self.tail_s

    @cached_property
    def whole_s(self) -> float:
        """Forward and backward of all batches of the update."""
        return self.earlier_s + self.forward_s + self.backward_s


@dataclass(frozen=True, eq=False)
class BatchCurve:
    """Seconds at rising batch `sizes`, shape (sizes, parts), and what each sample adds below and above them.

    There is one part, all of forward and backward, if only that was measured at each size.
    """

    sizes: tuple[float, ...]
    seconds: Floats
    below: Floats
    above: Floats

    def at(self, size: float) -> Floats:
        """Seconds of each part, shape (parts,)."""
        first, last = self.sizes[0], self.sizes[-1]
        inside = np.array([np.interp(size, self.sizes, part) for part in self.seconds.T])
        beyond: Floats = inside + self.below * min(0.0, size - first) + self.above * max(0.0, size - last)
        return np.maximum(beyond, self.seconds[0] * (size / first)) if size < first else beyond


def parts(
    compute_ms: float, backward_ms: float | None, accumulate: int, forward_shares: Sequence[float], ready_ms: Floats
) -> ComputeTimes:
    """The parts of `compute_ms`, forward and backward of all batches of an update, in which `backward_ms` is backward.

    If the framework cannot separate forward from backward, backward ends with its last gradient and the rest is
    forward. Times of single gradients, medians, are scaled to the mean of backward.
    """
    earlier = compute_ms * (1 - 1 / accumulate)  # batches before the last one are finished when its backward starts
    last_ready = float(ready_ms[-1])
    backward = max(0.0, min(last_ready if backward_ms is None else backward_ms, compute_ms))
    last = backward if backward_ms is None else backward / accumulate
    forward = max(0.0, compute_ms - earlier - last)
    ready = ready_ms * (min(1.0, last / last_ready) if last_ready > 0 else 0.0)
    return ComputeTimes(
        forward=1e-3 * forward * np.asarray(forward_shares, np.float64),
        segments=1e-3 * np.diff(ready, prepend=0.0),
        tail_s=1e-3 * max(0.0, last - float(ready[-1])),
        earlier_s=1e-3 * earlier,
    )


def of_profile(profile: Profile, forward_shares: Sequence[float]) -> BatchCurve | None:
    """The curve of a profile whose own layers have these shares of forward; None if it has one batch size."""
    batches = profile.batches
    if len(batches) < 2:
        return None
    sizes = tuple(float(batch.batch_size * profile.accumulate) for batch in batches)
    times = 1e-3 * np.array([batch.compute_ms for batch in batches])
    if not all(batch.tensor_ready_ms for batch in batches):
        seconds = not_falling(times)[:, None]
        slopes = np.diff(seconds, axis=0) / np.diff(sizes)[:, None]
        return BatchCurve(sizes, seconds, slopes[0], slopes[-1])
    rows = []
    for row in batches:
        measured = zip(profile.layers, row.layer_forward_ms, strict=False)
        forward = np.array([ms for layer, ms in measured if layer.forward_ms is not None])
        shares = (
            forward / forward.sum() if forward.sum() > 0 and len(forward) == len(forward_shares) else forward_shares
        )
        ready = np.array(row.tensor_ready_ms)
        rows.append(flat(parts(row.compute_ms, row.backward_ms, profile.accumulate, shares, ready)))
    seconds = np.stack(rows)
    seconds *= (not_falling(times) / times)[:, None]
    slopes = affine(sizes, seconds)[1]
    return BatchCurve(sizes, seconds, slopes, slopes)


def flat(of_batch: ComputeTimes) -> Floats:
    """All parts in a row."""
    return np.concatenate([of_batch.forward, of_batch.segments, [of_batch.tail_s, of_batch.earlier_s]])


def unflat(values: Floats, layers: int) -> ComputeTimes:
    """The parts that `flat` has put into a row, of so many layers."""
    return ComputeTimes(values[:layers], values[layers:-2], float(values[-2]), float(values[-1]))
