"""A comparison against an earlier one of the same recipe on the same machine: what has become faster or slower."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from hvdkit.commands.plan import Plan
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Recipe
from hvdkit.report.collect import Run
from hvdkit.report.rounds import by_kind
from hvdkit.results import intervals
from hvdkit.results.compare import BaselineRow, Comparison, read_comparison
from hvdkit.results.machine import this_machine
from hvdkit.results.train import TrainResult


@dataclass(frozen=True)
class Baseline:
    """An earlier comparison to compare with. A loss must exceed `margin`, a fraction."""

    old: Comparison
    margin: float

    def rows(self, runs: list[TrainResult]) -> list[BaselineRow]:
        """A row for each kind of run that both have."""
        old, rows = by_kind(map(Run, self.old.runs)), []
        for kind, group in by_kind(map(Run, runs)).items():
            if kind in old:
                now, before = (each.values("images_per_second") for each in (group, old[kind]))
                found = intervals.of_quotient(now, before)
                rows.append(
                    BaselineRow(
                        framework=group.framework,
                        np=group.np,
                        rival=group.rival,
                        **asdict(found),
                        rounds=len(now),
                        old_rounds=len(before),
                        margin=self.margin,
                        verdict=intervals.change(found, self.margin),
                    )
                )
        return rows


def plan(path: Path, margin: float, recipe: Recipe, plans: list[Plan]) -> Baseline:
    """Check that the planned runs can be compared with those in `path`.

    Raises RequestError where the file is missing or damaged, is of another machine or recipe, has none of the planned
    runs, or the margin is none.
    """
    if not 0 <= margin < 1:
        raise RequestError(f"--margin {margin}: expected a fraction from 0 to below 1, such as 0.05")
    old = read_comparison(path)
    here = this_machine()
    for key in ("processor", "cores"):
        before, now = getattr(old.machine, key), getattr(here, key)
        if before != now:
            raise RequestError(
                f"--baseline {path}: expected this machine; {key}: the baseline has {before}, here are {now}"
            )
    wanted = {(each.framework, each.np, each.rival) for each in plans}
    common = [run for run in old.runs if Run(run).kind in wanted]
    if not common:
        has = ", ".join(f"{group.label} at {group.np} rank(s)" for group in by_kind(map(Run, old.runs)).values())
        raise RequestError(f"--baseline {path}: expected some of the runs that are asked for; it has {has}")
    # What must be equal for images per second to mean the same, by the keys of TrainResult.
    mine = {
        "recipe": recipe.name,
        "model": recipe.model.name,
        "launcher": plans[0].placement.launcher,
        "threads": plans[0].recipe.threads,
        "batch_size": recipe.batch_size,
        "compression": str(recipe.compression),
        "optimizer": recipe.optimizer.name,
        "precision": recipe.precision,
        "accumulate": recipe.accumulate,
        "recompute": recipe.recompute,
        "sync": recipe.sync and recipe.sync.model_dump(),
        "allreduce": recipe.allreduce,
    }
    for run in common:
        for key, value in mine.items():
            if value != getattr(run, key):
                raise RequestError(
                    f"--baseline {path}: expected the same recipe; {key}: the baseline has {getattr(run, key)}, this "
                    f"comparison {value}"
                )
    return Baseline(old, margin)
