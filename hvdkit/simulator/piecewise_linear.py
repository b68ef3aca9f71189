"""Time as a piecewise linear function of bytes: communication costs are sums, minima and maxima of these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.simulator.cluster import Piece

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class PiecewiseLinear:
    """seconds = latency[i] + slope[i] × bytes for sizes from starts[i] up to starts[i + 1]; starts[0] is 0.

    The three arrays have shape (pieces,); `latency` is in seconds, `slope` in seconds per byte.
    """

    starts: Floats
    latency: Floats
    slope: Floats

    def __call__(self, size: Any) -> Any:
        """The seconds for `size` bytes, a number or an array."""
        index = np.searchsorted(self.starts, size, side="right") - 1
        return self.latency[index] + self.slope[index] * size

    def repeated(self, times: float, part: float) -> PiecewiseLinear:
        """`times` messages one after the other, each with the fraction `part` of the bytes."""
        return PiecewiseLinear(self.starts / part, self.latency * times, self.slope * times * part)

    def slowed(self, factor: float) -> PiecewiseLinear:
        """The same at a rate that is lower by `factor`; latencies stay."""
        return PiecewiseLinear(self.starts, self.latency, self.slope * factor)


ZERO = PiecewiseLinear(np.zeros(1), np.zeros(1), np.zeros(1))


@dataclass(frozen=True)
class BucketTimes:
    """How long one collective takes for any bucket of gradients, for many cases at once.

    `costs` has a function for each case; `sizes` are the bytes of each tensor, shape (tensors, cases).
    """

    costs: Sequence[PiecewiseLinear]
    sizes: Floats

    @cached_property
    def _padded(self) -> tuple[Floats, Floats, Floats]:
        """Starts, latencies and slopes of all cases, each of shape (cases, most pieces)."""
        most = max(len(cost.starts) for cost in self.costs)
        starts = np.full((len(self.costs), most), np.inf)
        latency, slope = np.zeros((2, len(self.costs), most))
        for row, cost in enumerate(self.costs):
            count = len(cost.starts)
            starts[row, :count], latency[row, :count], slope[row, :count] = cost.starts, cost.latency, cost.slope
        return starts, latency, slope

    @cached_property
    def _cumulative(self) -> Floats:
        return np.concatenate([np.zeros((1, self.sizes.shape[1])), self.sizes.cumsum(axis=0)])

    def seconds(self, first: Any, last: Any) -> Floats:
        """The time of tensors `first` to `last` in one bucket; 0 where the bucket has no bytes.

        Each is an index, or an array whose last axis has one index for each case.
        """
        cases = np.arange(self.sizes.shape[1])
        sizes = self._cumulative[np.asarray(last) + 1, cases] - self._cumulative[first, cases]
        starts, latency, slope = self._padded
        index = np.zeros(sizes.shape, int)
        for column in range(1, starts.shape[1]):
            index += sizes >= starts[:, column]
        return np.where(sizes > 0, latency[cases, index] + slope[cases, index] * sizes, 0.0)


def of_pieces(pieces: Sequence[Piece]) -> PiecewiseLinear:
    """The function that the pieces of a cluster file describe."""
    return PiecewiseLinear(
        np.array([float(piece.from_bytes) for piece in pieces]),
        np.array([1e-6 * piece.latency_us for piece in pieces]),
        np.array([8e-6 / piece.mbit_per_s for piece in pieces]),
    )


def total(costs: Sequence[PiecewiseLinear]) -> PiecewiseLinear:
    """All of them one after the other, each with all the bytes."""
    return _combined(costs, lambda latency, slope: (latency.sum(axis=0), slope.sum(axis=0)))


def bottleneck(costs: Sequence[PiecewiseLinear], shares: Sequence[float]) -> PiecewiseLinear:
    """A pipeline through all of them: latencies are averaged with the weights `shares`, the slowest rate counts."""
    weights = np.asarray(shares, float)[:, None]
    return _combined(costs, lambda latency, slope: ((weights * latency).sum(axis=0), slope.max(axis=0)))


def least(costs: Sequence[PiecewiseLinear]) -> PiecewiseLinear:
    """The lowest of the functions at each number of bytes."""
    found = costs[0]
    for other in costs[1:]:
        starts = np.unique(np.concatenate([found.starts, other.starts]))
        (a, b), (c, d) = _on(found, starts), _on(other, starts)
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = (c - a) / (b - d)
        ends = np.append(starts[1:], np.inf)
        inside = crossing[np.isfinite(crossing) & (crossing > starts) & (crossing < ends)]
        starts = np.unique(np.concatenate([starts, inside]))
        (a, b), (c, d) = _on(found, starts), _on(other, starts)
        middle = np.append((starts[:-1] + starts[1:]) / 2, 2 * starts[-1] + 1)
        lower = a + b * middle <= c + d * middle
        found = PiecewiseLinear(starts, np.where(lower, a, c), np.where(lower, b, d))
    return found


def _combined(
    costs: Sequence[PiecewiseLinear], combine: Callable[[Floats, Floats], tuple[Floats, Floats]]
) -> PiecewiseLinear:
    starts = np.unique(np.concatenate([cost.starts for cost in costs]))
    latency, slope = (np.stack(rows) for rows in zip(*(_on(cost, starts) for cost in costs), strict=True))
    return PiecewiseLinear(starts, *combine(latency, slope))


def _on(cost: PiecewiseLinear, starts: Floats) -> tuple[Floats, Floats]:
    """Latency and slope of the pieces that hold from each of `starts` on."""
    index = np.searchsorted(cost.starts, starts, side="right") - 1
    return cost.latency[index], cost.slope[index]
