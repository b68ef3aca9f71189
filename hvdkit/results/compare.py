"""The schema of `compare.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from hvdkit.errors import RequestError
from hvdkit.results.json_files import Figures, Result
from hvdkit.results.machine import Machine
from hvdkit.results.parity import Parity
from hvdkit.results.train import TrainResult


class Ratio(Figures):
    """hvdkit against something else: the median of the rounds' ratios, and `low` to `high`, its bootstrap interval.

    `against` is a rival (`--rival`): images per second over the rival's. Or it is `np=1`: images per second over
    `np` times those of one rank, the scaling efficiency; over several hosts `np=4`, if one host has 4 ranks: images per
    second and rank over those of the run on one host. Both sides of a ratio ran in the same round. `confidence` is
    the most that the number of rounds allows, up to 0.95. The verdict is `tie` if the interval touches 0.99 to 1.01. It
    is None for an efficiency, which is not expected to exceed 1.
    """

    framework: str
    np: int
    against: str
    median: float
    low: float
    high: float
    rounds: int
    confidence: float
    verdict: Literal["faster", "slower", "tie"] | None = None

    @property
    def of_scaling(self) -> bool:
        """Whether it is a scaling efficiency."""
        return self.against.startswith("np=")

    @property
    def shown(self) -> str:
        """The verdict for people; a dash if there is none, or only one round and so no interval."""
        return self.verdict if self.verdict and self.rounds > 1 else "–"


class BaselineRow(Figures):
    """A group of runs against an earlier comparison: the ratio of the medians of images per second, new ÷ old.

    The verdict is `worse` if the whole interval is below 1 - `margin`, `better` if it is above 1 + `margin`, else
    `tie`. `rounds` and `old_rounds` count the runs of the two sides.
    """

    framework: str
    np: int
    rival: str | None = None
    median: float
    low: float
    high: float
    rounds: int
    old_rounds: int
    margin: float
    verdict: Literal["better", "worse", "tie"]


class Comparison(Figures, Result, file="compare.json", of="the compare.json of `hvdkit compare`"):
    """`compare.json`. `parity` is None with `--no-parity`, `baseline` is None without `--baseline`.

    `runs` are sorted by round, then by the order on the command line. `order` has their names in the order in which
    they ran, shuffled within each round by `order_seed`.
    """

    runs: list[TrainResult]
    rounds: int = 1
    order_seed: int | None = None
    order: list[str] = Field(default_factory=list)
    ratios: list[Ratio] = Field(default_factory=list)
    baseline: list[BaselineRow] | None = None
    parity: Parity | None = None
    machine: Machine

    def records(self) -> list[dict[str, Any]]:
        """A row for each of `runs`: the single values of its result."""
        single = str | int | float | None
        return [{key: value for key, value in run if isinstance(value, single)} for run in self.runs]

    @classmethod
    def read(cls, path: Path) -> Self:
        """As in the base class; a file without runs is damaged."""
        comparison = super().read(path)
        if not comparison.runs:
            raise RequestError(f"{path}: not {cls.OF}: it has no runs")
        return comparison


read_comparison = Comparison.read
