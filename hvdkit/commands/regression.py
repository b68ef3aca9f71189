"""A comparison against an earlier one of the same recipe on the same machine: what has become faster or slower."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hvdkit.baselines import registry
from hvdkit.commands.plan import Plan
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Recipe
from hvdkit.results import intervals
from hvdkit.results.compare import BaselineRow, Comparison, read_comparison
from hvdkit.results.machine import Machine, this_machine
from hvdkit.results.train import TrainResult

Kind = tuple[str, int, str | None]  # framework, np, rival


@dataclass(frozen=True)
class Baseline:
    """An earlier comparison to compare with. A loss must exceed `margin`, a fraction."""

    old: Comparison
    margin: float

    def rows(self, runs: list[TrainResult]) -> list[BaselineRow]:
        """A row for each kind of run that both have."""
        old, new = _speeds(self.old.runs), _speeds(runs)
        rows = []
        for kind in [kind for kind in new if kind in old]:
            framework, np, rival = kind
            found = intervals.of_quotient(new[kind], old[kind])
            rows.append(
                BaselineRow(
                    framework=framework,
                    np=np,
                    rival=rival,
                    **asdict(found),
                    rounds=len(new[kind]),
                    old_rounds=len(old[kind]),
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
    _check_machine(old.machine, this_machine(), path)
    wanted = {(each.framework, each.np, each.rival) for each in plans}
    common = [run for run in old.runs if (run.framework, run.np, run.rival) in wanted]
    if not common:
        has = ", ".join(dict.fromkeys(_named((run.framework, run.np, run.rival)) for run in old.runs))
        raise RequestError(f"--baseline {path}: expected some of the runs that are asked for; it has {has}")
    mine = _recipe_keys(recipe, plans[0])
    for run in common:
        for key, value in mine.items():
            if value != getattr(run, key):
                raise RequestError(
                    f"--baseline {path}: expected the same recipe; {key}: the baseline has {getattr(run, key)}, this "
                    f"comparison {value}"
                )
    return Baseline(old, margin)


def _check_machine(old: Machine, new: Machine, path: Path) -> None:
    for key in ("processor", "cores"):
        before, now = getattr(old, key), getattr(new, key)
        if before != now:
            raise RequestError(
                f"--baseline {path}: expected this machine; {key}: the baseline has {before}, here are {now}"
            )


def _recipe_keys(recipe: Recipe, plan: Plan) -> Mapping[str, Any]:
    """What must be equal for images per second to mean the same, by the keys of TrainResult."""
    return {
        "recipe": recipe.name,
        "model": recipe.model.name,
        "launcher": plan.placement.launcher,
        "threads": plan.recipe.threads,
        "batch_size": recipe.batch_size,
        "compression": str(recipe.compression),
        "optimizer": recipe.optimizer.name,
        "precision": recipe.precision,
        "accumulate": recipe.accumulate,
        "recompute": recipe.recompute,
        "sync": recipe.sync and recipe.sync.model_dump(),
        "allreduce": recipe.allreduce,
    }


def _speeds(runs: list[TrainResult]) -> dict[Kind, list[float]]:
    speeds: dict[Kind, list[float]] = defaultdict(list)
    for run in runs:
        speeds[run.framework, run.np, run.rival].append(run.images_per_second)
    return speeds


def _named(kind: Kind) -> str:
    framework, np, rival = kind
    return f"{registry.label(framework, rival)} at {np} rank(s)"
