"""Runs that differ only in their round, and the figures of all of them together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from hvdkit.baselines.registry import label
from hvdkit.report.collect import Run
from hvdkit.results import intervals
from hvdkit.results.train import TrainResult


@dataclass(frozen=True)
class Estimate:
    """The median of `n` values with its bootstrap interval (`hvdkit.results.intervals`); a single value has none."""

    middle: float
    low: float | None
    high: float | None
    n: int

    @property
    def sure(self) -> str:
        """The number of rounds and the confidence that they allow."""
        return f"{self.n} rounds, {100 * intervals.confidence(self.n):.0f} % sure"

    def text(self, digits: int = 1) -> str:
        """Such as `425.2 (420.1–431.0)`."""
        if self.low is None or self.high is None:
            return f"{self.middle:,.{digits}f}"
        return f"{self.middle:,.{digits}f} ({self.low:,.{digits}f}–{self.high:,.{digits}f})"

    def times(self, factor: float) -> Estimate:
        """The estimate in another unit."""
        low, high = (None if end is None else factor * end for end in (self.low, self.high))
        return Estimate(factor * self.middle, low, high, self.n)


def interval(values: Sequence[float]) -> Estimate:
    """The estimate of at least one value."""
    return _interval(tuple(values))


@functools.lru_cache(maxsize=4096)  # a page needs each of them in several charts and tables
def _interval(values: tuple[float, ...]) -> Estimate:
    if len(values) == 1:
        return Estimate(float(values[0]), None, None, 1)
    found = intervals.of_values(values)
    return Estimate(found.median, found.low, found.high, len(values))


@dataclass(frozen=True)
class Group:
    """The rounds of one framework at one number of ranks, trained by hvdkit or by a rival."""

    framework: str
    np: int
    rival: str | None
    runs: list[Run]

    @property
    def label(self) -> str:
        """Its name among the groups with the same number of ranks."""
        return label(self.framework, self.rival)

    @property
    def first(self) -> TrainResult:
        """The first round's result, for what is the same in all rounds."""
        return self.runs[0].result

    def values(self, key: str) -> list[float]:
        """A figure of each round that has it."""
        found = [getattr(run.result, key) for run in self.runs]
        return [value for value in found if value is not None]

    def middle(self, key: str) -> float | None:
        """The median of a figure over the rounds that have it."""
        values = self.values(key)
        return median(values) if values else None

    def interval(self, key: str) -> Estimate | None:
        """The estimate of a figure; None if no round has it."""
        values = self.values(key)
        return interval(values) if values else None

    @property
    def speed(self) -> Estimate:
        """Images per second."""
        return interval(self.values("images_per_second"))

    @property
    def steps(self) -> list[float]:
        """The measured steps of all rounds on their slowest rank, in ms."""
        return [value for run in self.runs for value in run.result.step_ms]


def grouped(runs: list[Run], by_ranks: bool = True) -> list[Group]:
    """The groups of runs, `by_ranks` or else in the order of their first rounds; a framework's rivals follow it."""
    members: dict[tuple[str, int, str | None], list[Run]] = {}
    for run in runs:
        members.setdefault((run.result.framework, run.result.np, run.result.rival), []).append(run)
    groups = [Group(*key, found) for key, found in members.items()]
    if not by_ranks:
        return groups
    order = list(dict.fromkeys(group.framework for group in groups))
    return sorted(groups, key=lambda group: (group.np, order.index(group.framework), group.rival is not None))


def ratio(above: Group, below: Group) -> Estimate:
    """Images per second of one group over the other's, by rounds; of the medians if they have no round in common."""
    mine, theirs = ({run.result.round: run.result.images_per_second for run in group.runs} for group in (above, below))
    common = [mine[round_] / theirs[round_] for round_ in mine if round_ in theirs]
    return interval(common) if common else Estimate(above.speed.middle / below.speed.middle, None, None, 1)


def efficiency(group: Group, groups: list[Group]) -> Estimate | None:
    """Scaling efficiency: images per second over those of one rank times the number of ranks, a fraction of 1.

    None if there is no run at one rank.
    """
    for alone in groups:
        if (alone.framework, alone.rival, alone.np) == (group.framework, group.rival, 1):
            if group.np == 1:
                return Estimate(1.0, None, None, len(group.runs))
            return ratio(group, alone).times(1 / group.np)
    return None
