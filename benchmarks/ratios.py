"""Medians of ratios with their intervals, for benchmarks that run two sides in turn."""

from __future__ import annotations

from typing import Any

from hvdkit.results.intervals import of_values


def interval(ratios: list[float]) -> dict[str, Any]:
    """The median of the rounds' ratios, its 95 % interval by the percentile bootstrap, and each ratio."""
    found = of_values(ratios)
    return {
        "median": found.median,
        "low": found.low,
        "high": found.high,
        "ratios": [round(ratio, 4) for ratio in ratios],
    }


def told(found: dict[str, Any], digits: int) -> str:
    """An `interval`, as `1.02 (0.98–1.06)`; what came of one round stands alone."""
    middle, low, high = (f"{found[key]:.{digits}f}" for key in ("median", "low", "high"))
    return middle if found["low"] == found["high"] else f"{middle} ({low}–{high})"
