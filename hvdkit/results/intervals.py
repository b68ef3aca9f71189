"""Medians of a few rounds and their confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
TIE = 0.01  # a ratio this close to 1 counts as 1


@dataclass(frozen=True)
class Interval:
    """A median with its bootstrap interval."""

    median: float
    low: float
    high: float


def of_values(values: Sequence[float]) -> Interval:
    """The median of the values, and its 95 % interval by the percentile bootstrap (Efron 1979), with a fixed seed.

    The interval of one value is that value. With fewer than six values its confidence is lower: see `confidence`.
    """
    given = np.asarray(values, np.float64)
    low, high = _middle(_medians(given, np.random.default_rng(0)))
    return Interval(float(np.median(given)), low, high)


def of_quotient(above: Sequence[float], below: Sequence[float]) -> Interval:
    """The quotient of two medians and its interval; the sides are resampled independently, as they are not paired."""
    random = np.random.default_rng(0)
    first, second = np.asarray(above, np.float64), np.asarray(below, np.float64)
    low, high = _middle(_medians(first, random) / _medians(second, random))
    return Interval(float(np.median(first) / np.median(second)), low, high)


def confidence(values: int) -> float:
    """The highest confidence that an interval of the median of n values can have, at most CONFIDENCE.

    The widest interval, from the smallest value to the largest, misses the true median if all values lie on one side of
    it, which has a probability of 2 × 0.5^n.
    """
    return min(CONFIDENCE, 1 - 2 * 0.5**values)


def verdict(interval: Interval) -> Literal["faster", "slower", "tie"]:
    """The verdict on hvdkit ÷ a rival: `faster`, `slower`, or `tie` if the interval touches 1 ± TIE."""
    if interval.low > 1 + TIE:
        return "faster"
    return "slower" if interval.high < 1 - TIE else "tie"


def change(interval: Interval, margin: float) -> Literal["better", "worse", "tie"]:
    """The verdict on new ÷ old: `better` or `worse` if the whole interval is beyond the margin, else `tie`."""
    if interval.high < 1 - margin:
        return "worse"
    return "better" if interval.low > 1 + margin else "tie"


def _medians(values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    medians: np.ndarray = np.median(random.choice(values, (RESAMPLES, len(values))), axis=1)
    return medians


def _middle(values: np.ndarray) -> tuple[float, float]:
    outside = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(values, [outside, 100 - outside])
    return float(low), float(high)
