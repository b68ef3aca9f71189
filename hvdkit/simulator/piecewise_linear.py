"""Time as a piecewise linear function of bytes, fitted to measured times or combined from others.

Communication costs are sums, minima and maxima of such functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.simulator.cluster import MOST_FALL, CurvePiece

Floats = NDArray[np.float64]
_FEWEST = 3  # points in a piece of a fit; any two points lie on a line
_LAST = 16.0  # the asymptotic rate of a measured curve is the mean over this factor of its largest sizes
_NOISE = 0.01  # relative error of measured times; smaller errors do not justify another piece


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

    def repeated(self, times: float, share: float) -> PiecewiseLinear:
        """`times` messages one after the other, each with the fraction `part` of the bytes."""
        return PiecewiseLinear(self.starts / share, self.latency * times, self.slope * times * share)

    def slowed(self, factor: float) -> PiecewiseLinear:
        """The same at a rate that is lower by `factor`: as if there were so many times the bytes; latencies stay."""
        return self.repeated(1.0, factor)

    def times(self, factor: float) -> PiecewiseLinear:
        """So many times the time."""
        return PiecewiseLinear(self.starts, self.latency * factor, self.slope * factor)

    def __add__(self, other: PiecewiseLinear) -> PiecewiseLinear:
        """One after the other, each with all the bytes."""
        starts = np.union1d(self.starts, other.starts)
        (a, b), (c, d) = self.on(starts), other.on(starts)
        return PiecewiseLinear(starts, a + c, b + d)

    def on(self, starts: Floats) -> tuple[Floats, Floats]:
        """Latency and slope of the pieces that hold from each of `starts` on."""
        index = np.searchsorted(self.starts, starts, side="right") - 1
        return self.latency[index], self.slope[index]

    @property
    def parts(self) -> tuple[PiecewiseLinear, PiecewiseLinear]:
        """The latency, and the time that the bytes occupy the link: all of them at the rate of the largest sizes.

        Together they are the whole, and neither has its jumps.
        """
        occupied = least([self, ray(float(self.slope[-1]))])
        return self + occupied.times(-1), occupied

    def pipelined(self, hops: float) -> PiecewiseLinear:
        """Through so many hops one after the other, in parts: each adds its latency, the bytes count once."""
        latency, occupied = self.parts
        return latency.times(hops) + occupied


def ray(seconds_per_byte: float) -> PiecewiseLinear:
    """A rate without any latency."""
    return PiecewiseLinear(np.zeros(1), np.zeros(1), np.array([seconds_per_byte]))


ZERO = ray(0.0)


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


def of_pieces(pieces: Sequence[CurvePiece]) -> PiecewiseLinear:
    """The function that the pieces of a cluster file describe."""
    return PiecewiseLinear(
        np.array([float(piece.from_bytes) for piece in pieces]),
        np.array([1e-6 * piece.latency_us for piece in pieces]),
        np.array([8e-6 / piece.mbit_per_s for piece in pieces]),
    )


def of_measured(pieces: Sequence[CurvePiece], largest: float) -> PiecewiseLinear:
    """The function of a measured curve, which continues beyond `largest` bytes at its asymptotic rate.

    That is the mean rate over the last factor of _LAST in size: the last piece alone may be a few points with noise,
    and a line through zero there would carry their latency on as if it were a rate.
    """
    line = rising(of_pieces(pieces))
    early = largest / _LAST
    slope = float(line(largest) - line(early)) / (largest - early)
    kept = line.starts < largest
    return PiecewiseLinear(
        np.append(line.starts[kept], largest),
        np.append(line.latency[kept], float(line(largest)) - slope * largest),
        np.append(line.slope[kept], slope),
    )


def total(costs: Iterable[PiecewiseLinear]) -> PiecewiseLinear:
    """All of them one after the other."""
    return sum(costs, ZERO)


def bottleneck(costs: Sequence[PiecewiseLinear], shares: Sequence[float]) -> PiecewiseLinear:
    """A pipeline through all of them: the slowest rate counts, other times are averaged with the weights `shares`.

    Each time is divided into what the bytes occupy the link and the rest, which is latency. Both rise with
    the bytes and have no jumps where the costs have none.
    """
    rest, occupied = zip(*(cost.parts for cost in costs), strict=True)
    averaged = [latency.times(share) for latency, share in zip(rest, shares, strict=True)]
    return rising(total([*averaged, greatest(occupied)]))


def rising(cost: PiecewiseLinear) -> PiecewiseLinear:
    """The lowest function above `cost` that never falls: where it would, the time stays until it is exceeded."""
    ends = np.append(cost.starts[1:], np.inf)
    pieces: list[tuple[float, float, float]] = []
    reached = 0.0
    for start, end, a, b in zip(cost.starts, ends, cost.latency, cost.slope, strict=True):
        begins = start
        if a + b * start < reached * (1 - 1e-12):
            pieces.append((start, reached, 0.0))
            begins = (reached - a) / b if b > 0 else np.inf
        if begins < end:
            pieces.append((begins, a, b))
            reached = max(reached, a + b * end) if end < np.inf else reached
    starts, latency, slope = np.array(pieces).T
    return PiecewiseLinear(starts, latency, slope)


def least(costs: Sequence[PiecewiseLinear]) -> PiecewiseLinear:
    """The lowest of the functions at each number of bytes."""
    return reduce(partial(_extreme, np.less), costs)


def greatest(costs: Sequence[PiecewiseLinear]) -> PiecewiseLinear:
    """The highest of the functions at each number of bytes."""
    return reduce(partial(_extreme, np.greater), costs)


def _extreme(better: Callable[..., Any], one: PiecewiseLinear, other: PiecewiseLinear) -> PiecewiseLinear:
    starts = np.union1d(one.starts, other.starts)
    (a, b), (c, d) = one.on(starts), other.on(starts)
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = (c - a) / (b - d)
    inside = np.isfinite(crossing) & (crossing > starts) & (crossing < np.append(starts[1:], np.inf))
    starts = np.union1d(starts, crossing[inside])
    (a, b), (c, d) = one.on(starts), other.on(starts)
    middle = np.append((starts[:-1] + starts[1:]) / 2, 2 * starts[-1] + 1)
    # By the difference, as nearly parallel lines cross at sizes where their times are the same to the last digit.
    theirs = better((c - a) + (d - b) * middle, 0.0)
    return PiecewiseLinear(starts, np.where(theirs, c, a), np.where(theirs, d, b))


def fit(sizes: Sequence[float], seconds: Sequence[float], most: int = 8) -> list[CurvePiece]:
    """At most `most` pieces through the points (bytes, seconds); a size may occur several times.

    Dynamic programming finds the pieces of least mean squared *relative* error, since a latency of 30 µs matters as
    much as one of 30 ms. The number of pieces has the lowest Bayesian information criterion (Schwarz 1978); a piece
    holds at least three points, and ends between its last and the next one's first where it would be above the latter.

    Raises ValueError if the lengths differ, there are no points, a size is negative, or a time is not above 0.
    """
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    if x.shape != y.shape or not len(x) or not (x >= 0).all() or not ((y > 0) & np.isfinite(y)).all():
        raise ValueError("expected as many sizes >= 0 as times > 0, and at least one")
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    count, scale = len(x), max(float(x[-1]), 1.0)
    lines, cost = _lines(x / scale, y)
    best, scores = cost[0], [_score(cost[0, count], count, 1)]
    choices: list[Any] = []  # by piece from the second on, where it begins for each end
    for pieces in range(2, most + 1):
        through = best[:, None] + cost
        choices.append(through.argmin(axis=0))
        best = through.min(axis=0)
        scores.append(_score(best[count], count, pieces))
    bounds = [count]
    for choice in reversed(choices[: int(np.argmin(scores))]):
        bounds.insert(0, int(choice[bounds[0]]))
    curve: list[CurvePiece] = []
    for begin, end in itertools.pairwise([0, *bounds]):
        latency, slope = lines[:, begin, end] / (1.0, scale)
        rate = min(1e18, 8e-6 / max(slope, 1e-30))
        start = _start(curve[-1], latency, slope, x[begin - 1], x[begin]) if curve else 0
        least = (1 - MOST_FALL) * curve[-1].microseconds(start) if curve else 0.0
        latency_us = max(latency * 1e6, least - 8 * start / rate)
        curve.append(CurvePiece(from_bytes=start, latency_us=latency_us, mbit_per_s=rate))
    return curve


def not_falling(values: Floats) -> Floats:
    """The nearest values that do not fall: means over those that do (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pools.append((float(value), 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (one, many), (other, more) = pools[-2:]
            pools[-2:] = [((one * many + other * more) / (many + more), many + more)]
    return np.concatenate([np.full(count, value) for value, count in pools])


def residual_percent(pieces: Sequence[CurvePiece], sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The root mean squared relative error of a fit, in percent."""
    errors = of_pieces(pieces)(np.asarray(sizes, float)) / seconds - 1
    return 100 * math.sqrt(float((errors * errors).mean()))


def _lines(x: Floats, y: Floats) -> tuple[Floats, Floats]:
    """The best line through each run of points [begin, end): (latency, slope), neither below 0, and its error.

    Shapes are (2, count + 1, count + 1) and (count + 1, count + 1). The error is the sum of squared relative errors,
    infinite where a run of points cannot be a piece: of fewer than three, or where it would part equal sizes.
    """
    count, design = len(x), np.stack([1 / y, x / y], axis=1)
    lines, squares = np.zeros((2, count + 1, count + 1)), np.full((count + 1, count + 1), math.inf)
    cuts = [0, *(np.flatnonzero(np.diff(x) > 0) + 1), count]
    for begin, end in itertools.combinations(cuts, 2):
        if end - begin < min(_FEWEST, count):
            continue
        for kept in ([0, 1], [0], [1]):
            points = design[begin:end, kept]
            found, _, rank, _ = np.linalg.lstsq(points, np.ones(end - begin), rcond=None)
            square = float(((points @ found - 1) ** 2).sum())
            if rank == len(kept) and (found >= 0).all() and square < squares[begin, end]:
                lines[kept, begin, end], squares[begin, end] = found, square
                if len(kept) == 2:
                    break
    return lines, squares


def _start(before: CurvePiece, latency: float, slope: float, last: float, first: float) -> int:
    """Where a piece begins, between the last point of the piece before it and its own first one.

    That is its first point, or, if the piece before it is above it there, where they cross.
    """
    if 1e-6 * before.microseconds(first) <= latency + slope * first:
        return int(first)
    steeper = 8e-6 / before.mbit_per_s - slope
    crossing = (latency - 1e-6 * before.latency_us) / steeper if steeper > 0 else last
    return int(min(max(crossing, last + 1), first))


def _score(squares: float, count: int, pieces: int) -> float:
    """The Bayesian information criterion; a piece has three parameters: latency, slope and start."""
    return count * math.log(squares / count + _NOISE**2) + 3 * pieces * math.log(count)
