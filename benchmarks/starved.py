"""The arithmetic of `network.py`: the link's rate to choose, the limit, and the rows of bench-network.json.

A step takes c ms of computing and, with dense communication, k/r ms more, at a link of r Mbit/s. Communication's share
of the dense step is then s = 1 - c/d, d = c + k/r. A step that sends nothing is 1/(1 - s) = d/c times as fast: the
limit. A method whose step takes t has the speedup d/t and reaches (d/t)/(d/c) = c/t of the limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

COMPUTE, DENSE = "compute", "dense"
CLOSE = 0.01  # of dense's mean accuracy: as good
MARKS = {0.7: 0.95, 0.9: 0.85}  # the share of the limit to be reached, by communication's share of the dense step
Row = dict[str, Any]


def share_of(compute_ms: float, dense_ms: float) -> float:
    """Communication's share of the dense step: what is not computing is exposed."""
    return 1 - compute_ms / dense_ms


def limit_of(share: float) -> float:
    """How many times as fast a step is that sends nothing."""
    return 1 / (1 - share)


def rate_for(share: float, compute_ms: float, cost: float) -> float:
    """The rate in Mbit/s at which communication has this share of a step; `cost` is k.

    Raises ValueError for a share that no rate has, and where communication costs nothing.
    """
    if not 0 < share < 1:
        raise ValueError(f"share: expected more than 0 and less than 1, got {share}")
    if cost <= 0:
        raise ValueError("the dense step is no longer than computing")
    return cost * (1 - share) / (compute_ms * share)


def as_accurate(mean: float, dense: Sequence[float]) -> bool:
    """Whether a mean accuracy is within CLOSE of dense's, or not below its range."""
    return mean >= min(fmean(dense) - CLOSE, min(dense)) - 1e-12


def row(
    rounds: Sequence[Mapping[str, float]],
    method: str,
    steps_per_epoch: int,
    accuracies: Sequence[float],
    dense_accuracies: Sequence[float],
) -> Row:
    """A method's figures from its rounds, in ms a step by method with COMPUTE and DENSE, and from its trainings.

    Times are medians over the rounds, `share_of_limit` (compute ÷ step) and `speedup` (dense ÷ step) medians of the
    ratios within rounds; `…_low` and `…_high` are the least and the greatest. `epoch_s` leaves out evaluation.
    Accuracies are fractions of 1, a mean over seeds and its range, None where nothing was trained. `as_accurate`: the
    mean is within 0.01 of dense's or not below all of dense's.
    """
    steps = [each[method] for each in rounds]
    reached = [each[COMPUTE] / each[method] for each in rounds]
    mean = fmean(accuracies) if accuracies else None
    return {
        "share": median(share_of(each[COMPUTE], each[DENSE]) for each in rounds),
        "step_ms": median(steps),
        "step_ms_low": min(steps),
        "step_ms_high": max(steps),
        "compute_ms": median(each[COMPUTE] for each in rounds),
        "epoch_s": median(steps) * steps_per_epoch / 1e3,
        "share_of_limit": median(reached),
        "share_of_limit_low": min(reached),
        "share_of_limit_high": max(reached),
        "speedup": median(each[DENSE] / each[method] for each in rounds),
        "accuracy_mean": mean,
        "accuracy_low": min(accuracies, default=None),
        "accuracy_high": max(accuracies, default=None),
        "as_accurate": as_accurate(mean, dense_accuracies) if mean is not None and dense_accuracies else None,
        "rounds": len(rounds),
        "seeds": len(accuracies),
    }


def best(rows: Sequence[Row]) -> Row | None:
    """The fastest of those that are as accurate as dense; None where none is."""
    return max((one for one in rows if one["as_accurate"]), key=lambda one: one["share_of_limit"], default=None)


def missed(rows: Sequence[Row], framework: str) -> list[str]:
    """The targets that the framework's best method misses, a line for each; a share without rows is none."""
    lines = []
    for share, mark in MARKS.items():
        there = [one for one in rows if (one["framework"], one["asked_share"]) == (framework, share)]
        found = best(there)
        if there and found is None:
            untrained = all(one["as_accurate"] is None for one in there)
            lines.append(f"{share:.0%}: {'nothing was trained' if untrained else 'no method is as accurate as dense'}")
        elif found and found["share_of_limit"] < mark:
            lines.append(
                f"{share:.0%}: {found['method']} reaches {found['share_of_limit']:.3f} of the limit, "
                f"{found['speedup']:.2f} times; the target is {mark:.2f}, {limit_of(share) * mark:.2f} times"
            )
    return lines
