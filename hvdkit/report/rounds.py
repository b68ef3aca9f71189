"""Runs that differ in nothing but their round, and what can be said of them together."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.baselines.registry import label
from hvdkit.report.collect import Run
from hvdkit.results import intervals
from hvdkit.results.train import TrainResult


@dataclass(frozen=True)
class Interval:
    """The median of `n` values with its bootstrap interval (`hvdkit.results.intervals`); a single value has none."""

    middle: float
    low: float | None
    high: float | None
    n: int

    @property
    def sure(self) -> str:
        """How sure the interval can be, in words: from few values, less than 95 %."""
        return f"{self.n} rounds, {100 * intervals.confidence(self.n):.0f} % sure"

    def text(self, digits: int = 1) -> str:
        """`425.2 (420.1–431.0)`."""
        if self.low is None or self.high is None:
            return f"{self.middle:,.{digits}f}"
        return f"{self.middle:,.{digits}f} ({self.low:,.{digits}f}–{self.high:,.{digits}f})"


def interval(values: Sequence[float]) -> Interval:
    """Of at least one value."""
    return _interval(tuple(values))


@functools.lru_cache(maxsize=4096)  # a report asks for each of them in several charts and tables
def _interval(values: tuple[float, ...]) -> Interval:
    if len(values) == 1:
        return Interval(float(values[0]), None, None, 1)
    found = intervals.of_values(values)
    return Interval(found.median, found.low, found.high, len(values))


@dataclass(frozen=True)
class Group:
    """The rounds of one framework at one number of ranks, by hvdkit or by one rival in its place."""

    framework: str
    np: int
    rival: str | None
    runs: list[Run]

    @property
    def label(self) -> str:
        """Its name beside others at the same number of ranks."""
        return label(self.framework, self.rival)

    @property
    def first(self) -> TrainResult:
        """The first round's result, for what all rounds have in common."""
        return self.runs[0].result

    def values(self, key: str) -> list[float]:
        """A figure of every round that has it."""
        found = [getattr(run.result, key) for run in self.runs]
        return [value for value in found if value is not None]

    def interval(self, key: str) -> Interval | None:
        """A figure over the rounds; None where no round has it."""
        values = self.values(key)
        return interval(values) if values else None

    @property
    def speed(self) -> Interval:
        """Images per second."""
        return interval(self.values("images_per_second"))

    @property
    def steps(self) -> list[float]:
        """The measured steps of all rounds, in ms, largest rank's each."""
        return [value for run in self.runs for value in run.result.step_ms]


def grouped(runs: list[Run]) -> list[Group]:
    """Groups by number of ranks, then in the order in which their first rounds ran."""
    groups: dict[tuple[str, int, str | None], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.result.framework, run.result.np, run.result.rival), []).append(run)
    found = [Group(*key, members) for key, members in groups.items()]
    order = {name: index for index, name in enumerate(dict.fromkeys(group.framework for group in found))}
    return sorted(found, key=lambda group: (group.np, order[group.framework], group.rival is not None))


def ratio(above: Group, below: Group) -> Interval:
    """Images per second of one over another's, round by round; of the medians where they have no round in common."""
    mine, theirs = ({run.result.round: run.result.images_per_second for run in group.runs} for group in (above, below))
    common = [mine[round_] / theirs[round_] for round_ in mine if round_ in theirs]
    return interval(common) if common else Interval(above.speed.middle / below.speed.middle, None, None, 1)


def efficiency(group: Group, groups: list[Group]) -> Interval | None:
    """Images per second over those of the same at one rank times the number of ranks, a fraction of 1.

    None where nothing was run at one rank.
    """
    for alone in groups:
        if (alone.framework, alone.rival, alone.np) == (group.framework, group.rival, 1):
            if group.np == 1:
                return Interval(1.0, None, None, len(group.runs))
            found = ratio(group, alone)
            low, high = (None if end is None else end / group.np for end in (found.low, found.high))
            return Interval(found.middle / group.np, low, high, found.n)
    return None
