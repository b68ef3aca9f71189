"""Runs that differ only in their round, and the figures of all of them together."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median

from hvdkit.baselines.registry import label
from hvdkit.report.collect import Kind, Run
from hvdkit.results import intervals
from hvdkit.results.compare import BaselineRow, Comparison, Ratio
from hvdkit.results.train import TrainResult, readable


@dataclass(frozen=True)
class Estimate:
    """The median of `n` values with its bootstrap interval (`hvdkit.results.intervals`); a single value has none."""

    middle: float
    low: float | None
    high: float | None
    n: int

    def text(self, digits: int = 1) -> str:
        """Such as `425.2 (420.1–431.0)`."""
        if self.low is None or self.high is None:
            return f"{self.middle:,.{digits}f}"
        return f"{self.middle:,.{digits}f} ({self.low:,.{digits}f}–{self.high:,.{digits}f})"

    def times(self, factor: float) -> Estimate:
        """The estimate in another unit."""
        low, high = (None if end is None else factor * end for end in (self.low, self.high))
        return Estimate(factor * self.middle, low, high, self.n)


@functools.lru_cache(maxsize=4096)  # a page needs each of them in several charts and tables
def interval(values: tuple[float, ...]) -> Estimate:
    """The estimate of at least one value."""
    if len(values) == 1:
        return Estimate(float(values[0]), None, None, 1)
    measured = intervals.of_values(values)
    return Estimate(measured.median, measured.low, measured.high, len(values))


@dataclass(frozen=True)
class RunGroup:
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

    @property
    def hosts(self) -> int:
        """The number of hosts; 1 in results of earlier versions."""
        return len(set(self.first.hosts)) or 1

    def values(self, key: str, of_validation: bool = False) -> tuple[float, ...]:
        """A figure, or a validation metric, of each round that has it."""
        results = [run.result for run in self.runs]
        values = [(one.validation or {}).get(key) if of_validation else getattr(one, key) for one in results]
        return tuple(value for value in values if value is not None)

    def middle(self, key: str, of_validation: bool = False) -> float | None:
        """The median of a figure, or of a validation metric, over the rounds that have it."""
        values = self.values(key, of_validation)
        return median(values) if values else None

    @property
    def speed(self) -> Estimate:
        """Images, or the task's other units, per second."""
        return interval(self.values("images_per_second"))

    @property
    def steps(self) -> list[float]:
        """The measured steps of all rounds on their slowest rank, in ms."""
        return [value for run in self.runs for value in run.result.step_ms]


def own_metrics(runs: Iterable[Run]) -> list[str]:
    """The validation metrics to show beside accuracy: a task's own, and the loss of one without accuracy."""
    names = dict.fromkeys(name for run in runs for name in run.result.validation or {})
    return [name for name in names if name != "accuracy" and (name != "loss" or "accuracy" not in names)]


def titled(metric: str) -> str:
    """A metric's name for a column, beside the training loss."""
    return "validation loss" if metric == "loss" else readable(metric)


def by_kind(runs: Iterable[Run]) -> dict[Kind, RunGroup]:
    """The groups of runs, in the order of their first rounds."""
    groups: dict[Kind, RunGroup] = {}
    for run in runs:
        groups.setdefault(run.kind, RunGroup(*run.kind, [])).runs.append(run)
    return groups


def grouped(runs: Iterable[Run]) -> list[RunGroup]:
    """The groups of runs by their number of ranks; a framework's rivals follow it."""
    groups = by_kind(runs).values()
    order = list(dict.fromkeys(group.framework for group in groups))
    return sorted(groups, key=lambda group: (group.np, order.index(group.framework), group.rival is not None))


def paired(above: RunGroup, below: RunGroup) -> tuple[float, ...]:
    """Images per second of one group over the other's, for each round that both have."""
    mine, theirs = (
        {run.result.round or 1: run.result.images_per_second for run in group.runs} for group in (above, below)
    )
    return tuple(mine[number] / theirs[number] for number in mine if theirs.get(number))


def ratio(above: RunGroup, below: RunGroup) -> Estimate:
    """Images per second of one group over the other's, by rounds; of the medians if they have no round in common."""
    common = paired(above, below)
    return interval(common) if common else Estimate(above.speed.middle / below.speed.middle, None, None, 1)


def unscaled(group: RunGroup, groups: Iterable[RunGroup]) -> RunGroup | None:
    """The runs from which the scaling of this group is counted: those of one rank or, where runs are on several hosts,
    those of the most ranks on one host. None if there are none, or this group has fewer ranks.
    """
    alike = [other for other in groups if (other.framework, other.rival) == (group.framework, group.rival)]
    over_hosts = any(other.hosts > 1 for other in alike)
    smallest = [other for other in alike if other.hosts == 1 and (over_hosts or other.np == 1)]
    base = max(smallest, key=lambda other: other.np, default=None)
    return base if base and base.np <= group.np else None


def efficiency(group: RunGroup, groups: list[RunGroup]) -> Estimate | None:
    """Scaling efficiency: images per second and rank over those of the `unscaled` runs, a fraction of 1.

    None without them.
    """
    base = unscaled(group, groups)
    if base is group:
        return Estimate(1.0, None, None, len(group.runs))
    return ratio(group, base).times(base.np / group.np) if base else None


def ratios(runs: list[TrainResult]) -> list[Ratio]:
    """hvdkit's speed over each rival's, then over one rank's or one host's, for each framework and number of
    ranks."""
    groups = by_kind(map(Run, runs))
    pairs: list[tuple[RunGroup | None, RunGroup | None, str]] = []
    for group in groups.values():
        if group.rival:
            pairs.append((groups.get((group.framework, group.np, None)), group, group.rival))
    for group in groups.values():
        base = None if group.rival else unscaled(group, groups.values())
        if base and base is not group:
            pairs.append((group, base, f"np={base.np}"))
    rows: list[Ratio] = []
    for above, below, against in pairs:
        values = [value / (above.np / below.np) for value in paired(above, below)] if above and below else []
        if above and values:
            interval = intervals.of_values(values)
            rows.append(
                Ratio(
                    framework=above.framework,
                    np=above.np,
                    against=against,
                    **asdict(interval),
                    rounds=len(values),
                    confidence=intervals.confidence(len(values)),
                    verdict=None if against.startswith("np=") else intervals.verdict(interval),
                )
            )
    return rows


@dataclass(frozen=True)
class EarlierComparison:
    """An earlier comparison to compare with. A slowdown counts only beyond `margin`, a fraction."""

    old: Comparison
    margin: float

    def rows(self, runs: list[TrainResult]) -> list[BaselineRow]:
        """A row for each kind of run that both have."""
        old, rows = by_kind(map(Run, self.old.runs)), []
        for kind, group in by_kind(map(Run, runs)).items():
            if kind in old:
                now, before = (runs.values("images_per_second") for runs in (group, old[kind]))
                quotient = intervals.of_quotient(now, before)
                rows.append(
                    BaselineRow(
                        framework=group.framework,
                        np=group.np,
                        rival=group.rival,
                        **asdict(quotient),
                        rounds=len(now),
                        old_rounds=len(before),
                        margin=self.margin,
                        verdict=intervals.change(quotient, self.margin),
                    )
                )
        return rows
