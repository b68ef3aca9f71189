"""Piecewise lines through measured times: the fewest pieces that explain them, found by dynamic programming.

The cost that is minimised is the mean squared *relative* error, as a latency of 30 µs matters as much as one of 30 ms;
each further piece must lower the Bayesian information criterion (Schwarz 1978), and holds three points or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from hvdkit.simulator.cluster import Piece, piece_at

_FEWEST = 3  # points of a piece; two always fit
_NOISE = 0.01  # relative; measured times are not more exact than this, so no piece is spent on less


def fit(sizes: Sequence[float], seconds: Sequence[float], most: int = 8) -> list[Piece]:
    """Pieces through (bytes, seconds); sizes may repeat. `most` bounds how many pieces.

    Raises ValueError where the lengths differ, nothing is given, or a size is negative or a time not above 0.
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
    """The time of one message of `size` bytes."""
    piece = piece_at(pieces, size)
    return 1e-6 * (piece.latency_us + 8 * size / piece.mbit_per_s)


def residual_percent(pieces: list[Piece], sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """The root of the mean squared relative error of a fit."""
    errors = [seconds_of(pieces, size) / time - 1 for size, time in zip(sizes, seconds, strict=True)]
    return 100 * math.sqrt(sum(error * error for error in errors) / len(errors))


def _lines(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of all runs of points from `begin` to before `end`: (latency, slope), neither below 0, of least squared
    relative error, shape (count + 1, count + 1, 2), and that error, infinite where a run is no piece."""
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
        piece[:-1] &= x[ends[:-1]] > x[ends[:-1] - 1]  # one size is in one piece
        if begin == 0:
            piece[-1] = True
        lines[begin, ends] = each[which, :, np.arange(len(ends))]
        cost[begin, ends] = np.where(piece, squares[which, np.arange(len(ends))], math.inf)
    return lines, cost


def _score(squares: float, count: int, pieces: int) -> float:
    return count * math.log(squares / count + _NOISE**2) + 3 * pieces * math.log(count)
