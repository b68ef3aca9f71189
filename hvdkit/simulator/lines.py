"""Time over bytes as piecewise lines, and their sums, minima and maxima: what all costs are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.simulator.cluster import Piece

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Line:
    """seconds = latency[i] + slope[i] × bytes, from starts[i] bytes on; starts[0] is 0 and they rise."""

    starts: Floats
    latency: Floats
    slope: Floats

    def __call__(self, size: Any) -> Any:
        """Seconds of `size` bytes, a number or an array."""
        index = np.searchsorted(self.starts, size, side="right") - 1
        return self.latency[index] + self.slope[index] * size

    def repeated(self, times: float, part: float) -> Line:
        """`times` messages, each `part` of the bytes, one after the other."""
        return Line(self.starts / part, self.latency * times, self.slope * times * part)

    def slowed(self, factor: float) -> Line:
        """At a rate lower by `factor`; latencies stay."""
        return Line(self.starts, self.latency, self.slope * factor)


ZERO = Line(np.zeros(1), np.zeros(1), np.zeros(1))


def of_pieces(pieces: Sequence[Piece]) -> Line:
    """The line of a cluster file's pieces."""
    return Line(
        np.array([float(piece.from_bytes) for piece in pieces]),
        np.array([1e-6 * piece.latency_us for piece in pieces]),
        np.array([8e-6 / piece.mbit_per_s for piece in pieces]),
    )


def per_byte(seconds_per_byte: float) -> Line:
    """A line without latency."""
    return Line(np.zeros(1), np.zeros(1), np.array([seconds_per_byte]))


def total(lines: Sequence[Line]) -> Line:
    """One after the other, each with all the bytes."""
    return _joined(lines, lambda latency, slope: (latency.sum(axis=0), slope.sum(axis=0)))


def bottleneck(lines: Sequence[Line], shares: Sequence[float]) -> Line:
    """A pipeline through all lines at once: latencies add up by `shares`, the slowest rate counts."""
    weights = np.asarray(shares, float)[:, None]
    return _joined(lines, lambda latency, slope: ((weights * latency).sum(axis=0), slope.max(axis=0)))


def least(lines: Sequence[Line]) -> Line:
    """The lowest of the lines for each number of bytes."""
    if len(lines) == 1:
        return lines[0]
    found = lines[0]
    for other in lines[1:]:
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
        found = Line(starts, np.where(lower, a, c), np.where(lower, b, d))
    return found


def _joined(lines: Sequence[Line], join: Callable[[Floats, Floats], tuple[Floats, Floats]]) -> Line:
    starts = np.unique(np.concatenate([line.starts for line in lines]))
    on = [_on(line, starts) for line in lines]
    latency, slope = join(np.stack([each[0] for each in on]), np.stack([each[1] for each in on]))
    return Line(starts, latency, slope)


def _on(line: Line, starts: Floats) -> tuple[Floats, Floats]:
    index = np.searchsorted(line.starts, starts, side="right") - 1
    return line.latency[index], line.slope[index]
