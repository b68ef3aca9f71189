"""The order of a comparison's runs, and what is done with them by round."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hvdkit.commands import train
from hvdkit.commands.checked_run import CheckedRun
from hvdkit.errors import RequestError
from hvdkit.results.train import TrainResult
from hvdkit.tracking import trackers as tracking
from hvdkit.tracking.trackers import Trackers


@dataclass(frozen=True)
class RunOrder:
    """All runs of a comparison: each of `plans` once in each round, in an order that `seed` shuffles for each round.

    So all plans share what else the machine does over time, and none always follows the same other one.
    """

    plans: list[CheckedRun]
    rounds: int
    seed: int

    @property
    def numbers(self) -> range:
        """The numbers of the rounds."""
        return range(1, self.rounds + 1)

    def __iter__(self) -> Iterator[tuple[int, CheckedRun]]:
        for number in self.numbers:
            shuffled = list(self.plans)
            if self.rounds > 1 or any(plan.rival for plan in self.plans):
                random.Random(f"{self.seed} {number}").shuffle(shuffled)
            for plan in shuffled:
                yield number, plan

    def name(self, number: int, plan: CheckedRun) -> str:
        """A run's name within its comparison."""
        return name(plan) + (f"-round{number}" if self.rounds > 1 else "")


def name(plan: CheckedRun) -> str:
    """The name of a kind of run within its comparison."""
    return f"{plan.framework}-np{plan.np}" + (f"-{plan.rival}" if plan.rival else "")


def whole_rounds(schedule: RunOrder, folder: Path) -> dict[str, TrainResult]:
    """The results of complete earlier rounds: the runs of one round have to be close together in time."""
    kept: dict[str, TrainResult] = {}
    for number in schedule.numbers:
        titles = {schedule.name(number, plan): plan for plan in schedule.plans}
        results = {title: train.finished(plan, folder / "runs" / title) for title, plan in titles.items()}
        complete = {title: result for title, result in results.items() if result is not None and result.round == number}
        if len(complete) == len(titles):
            kept |= complete
    return kept


def log(schedule: RunOrder, folder: Path, names: list[str], say: Callable[[str], None]) -> None:
    """Log all runs to the named trackers, once nothing is measured any more. What fails is a warning by `say`."""
    for name in names:
        try:
            with Trackers([name], say) as trackers:
                for number, plan in schedule:
                    run_folder = folder / "runs" / schedule.name(number, plan)
                    trackers.begin(train.tracked(plan, run_folder, folder.name))
                    trackers.end("finished")
                if name in tracking.LIBRARIES:
                    say(f"{name}: {len(schedule.plans) * schedule.rounds} runs in the group {folder.name}")
        except RequestError as error:
            say(str(error))
