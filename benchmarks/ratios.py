"""Medians of ratios with their intervals, for benchmarks that run two sides in turn."""

from __future__ import annotations

from typing import Any

import numpy as np

RESAMPLES = 10_000


def interval(ratios: list[float]) -> dict[str, Any]:
    """The median of the rounds' ratios, and its 95 % interval by the percentile bootstrap."""
    values = np.array(ratios)
    resampled = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(resampled, axis=1), [2.5, 97.5])
    return {
        "median": float(np.median(values)),
        "low": float(low),
        "high": float(high),
        "ratios": values.round(4).tolist(),
    }
