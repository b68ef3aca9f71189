"""Fits a piecewise linear function of time over bytes to measured times.

Dynamic programming finds the pieces of least mean squared *relative* error, since a latency of 30 µs matters as much
as one of 30 ms. The number of pieces has the lowest Bayesian information criterion (Schwarz 1978); a piece holds at
least three points.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hvdkit.simulator.cluster import Piece

_FEWEST = 3  # points in a piece; any two points lie on a line
_NOISE = 0.01  # relative error of measured times; smaller errors do not justify another piece


def fit(sizes: Sequence[float], seconds: Sequence[float], most: int = 8) -> list[Piece]:
    """At most `most` pieces through the points (bytes, seconds); a size may occur several times.

    Raises ValueError if the lengths differ, there are no points, a size is negative, or a time is not above 0.
    """
    x, y = np.asarray(sizes, float), np.asarray(seconds, float)
    if x.shape != y.shape or not len(x) or not (x >= 0).all() or not ((y > 0) & np.isfinite(y)).all():
        raise ValueError("expected as many sizes >= 0 as times > 0, and at least one")
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    count, scale = len(x), max(float(x[-1]), 1.0)
    lines, cost = _lines(x / scale, y)
    best, choice = cost[0].copy(), {(1, end): 0 for end in range(count + 1)}
    chosen, chosen_score = 1, _score(best[count], count, 1)
    for pieces in range(2, most + 1):
        through = best[:, None] + cost
        best = through.min(axis=0)
        for end in range(count + 1):
            choice[pieces, end] = int(through[:, end].argmin())
        score = _score(best[count], count, pieces)
        if score < chosen_score:
            chosen, chosen_score = pieces, score
    found, end = [], count
    for pieces in range(chosen, 0, -1):
        begin = choice[pieces, end]
        found.append((begin, lines[begin, end] / (1.0, scale)))
        end = begin
    return [
        Piece(
            from_bytes=0 if begin == 0 else int(x[begin]),
            latency_us=latency * 1e6,
            mbit_per_s=min(1e18, 8e-6 / max(slope, 1e-30)),
        )
        for begin, (latency, slope) in reversed(found)
    ]


def seconds_of(pieces: list[Piece], size: float) -> float:
    """The time of a message of `size` bytes. The first piece also holds below its `from_bytes`."""
    piece = pieces[max(0, bisect.bisect_right([piece.from_bytes for piece in pieces], size) - 1)]
    return 1e-6 * (piece.latency_us + 8 * size / piece.mbit_per_s)


def residual_percent(pieces: list[Piece], sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The root mean squared relative error of a fit, in percent."""
    errors = [seconds_of(pieces, size) / time - 1 for size, time in zip(sizes, seconds, strict=True)]
    return 100 * math.sqrt(sum(error * error for error in errors) / len(errors))


def _lines(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The best line through each run of points [begin, end): (latency, slope), neither below 0, and its error.

    Shapes are (count + 1, count + 1, 2) and (count + 1, count + 1). The error is the sum of squared relative errors,
    infinite where a run of points cannot be a piece.
    """
    count = len(x)
    w = 1 / y
    terms = np.stack([w * w, w * w * x, w * w * x * x, w, w * x, np.ones(count)])
    sums = np.concatenate([np.zeros((6, 1)), terms.cumsum(axis=1)], axis=1)
    lines, cost = np.zeros((count + 1, count + 1, 2)), np.full((count + 1, count + 1), math.inf)
    for begin in range(count):
        ends = np.arange(begin + 1, count + 1)
        ww, wwx, wwxx, s, sx, n = sums[:, ends] - sums[:, [begin]]
        with np.errstate(divide="ignore", invalid="ignore"):
            determinant = ww * wwxx - wwx * wwx
            both = np.stack([s * wwxx - sx * wwx, ww * sx - wwx * s]) / determinant
            flat, steep = np.stack([s / ww, np.zeros(len(ends))]), np.stack([np.zeros(len(ends)), sx / wwxx])
        both[:, ~(determinant > 1e-9 * ww * wwxx) | (both < 0).any(axis=0)] = np.nan
        each = np.stack([both, flat, steep])
        a, b = each[:, 0], each[:, 1]
        squares = a * a * ww + 2 * a * b * wwx + b * b * wwxx - 2 * a * s - 2 * b * sx + n
        squares = np.where(np.isfinite(squares), np.maximum(squares, 0), math.inf)
        which = squares.argmin(axis=0)
        piece = ends - begin >= _FEWEST
        piece[:-1] &= x[ends[:-1]] > x[ends[:-1] - 1]  # equal sizes belong to one piece
        if begin == 0:
            piece[-1] = True
        lines[begin, ends] = each[which, :, np.arange(len(ends))]
        cost[begin, ends] = np.where(piece, squares[which, np.arange(len(ends))], math.inf)
    return lines, cost


def _score(squares: float, count: int, pieces: int) -> float:
    """The Bayesian information criterion; a piece has three parameters: latency, slope and start."""
    return count * math.log(squares / count + _NOISE**2) + 3 * pieces * math.log(count)
