"""`hvdkit advise RECIPE`: profile a recipe, or take the profile of an earlier run, and answer the question of it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.commands import predict
from hvdkit.commands import profile as profiling
from hvdkit.commands.predict import Plan, Question
from hvdkit.commands.profile import ProfilePlan
from hvdkit.defaults import FRAMEWORK, LAUNCHER, PROFILED_RANKS, STALL_TIMEOUT_S, STEPS
from hvdkit.errors import Faults, RequestError
from hvdkit.launch.placement import Placement
from hvdkit.recipe.schema import Recipe
from hvdkit.results.profile import Profile
from hvdkit.simulator import cluster as clusters

CLUSTER = "cluster.yaml"


@dataclass(frozen=True)
class Request:
    """What was asked for, checked. `source` is the question of a profile, or of a recipe that is measured first.

    `name` and `settings` are the recipe's.
    """

    name: str
    settings: dict[str, Any]
    source: Plan | tuple[ProfilePlan, Question]

    def plan(self, folder: Path) -> Plan:
        """The question of the profile, which is measured into `folder` if it is not there. Raises as `run` does."""
        return self.source if isinstance(self.source, Plan) else run(*self.source, folder)


def of_profile(path: Path, question: Question, of_recipes: Mapping[str, object]) -> Request:
    """The request for a profile. Raises RequestError, also if one of the options `of_recipes` is given."""
    given = ", ".join(name for name, value in of_recipes.items() if value not in (None, False))
    if given:
        raise RequestError(f"{given}: expected a recipe with it, got the profile {path}, which is measured")
    answered = question.of(predict.read(path))
    return Request(answered.profile.recipe, answered.profile.settings, answered)


def of_recipe(
    recipe: Recipe,
    question: Question,
    framework: str | None = None,
    np: int | None = None,
    hosts: str | None = None,
    steps: int | None = None,
    launcher: str | None = None,
    stall_timeout: float | None = None,
) -> Request:
    """The request for a recipe; None stands for the default. Raises RequestError with all its faults."""
    placement = Placement(
        PROFILED_RANKS if np is None else np,
        hosts,
        launcher or LAUNCHER,
        STALL_TIMEOUT_S if stall_timeout is None else stall_timeout,
    )
    measuring = plan(recipe, question, framework or FRAMEWORK, placement, STEPS if steps is None else steps)
    return Request(recipe.name, recipe.model_dump(), (measuring, question))


def plan(recipe: Recipe, question: Question, framework: str, placement: Placement, steps: int) -> ProfilePlan:
    """Check what was asked for. Raises RequestError with all its faults."""
    faults = Faults()
    if question.cluster is None and placement.np == 1:
        faults.append(f"--cluster: {predict.NO_LINKS}; or -np 2 or more, whose own links are taken")
    with faults.collected():
        measuring = profiling.plan(recipe, framework, placement, steps)
    faults.report()
    return measuring


def run(measuring: ProfilePlan, question: Question, folder: Path) -> Plan:
    """The question of a profile that is measured into `folder`, or is there already.

    Where no cluster was named, the links that were timed are written to `cluster.yaml`. Raises as `profile.run` does,
    and RequestError where the profile that is there is of another request.
    """
    path = folder / profiling.FILE
    if path.exists():
        profile = predict.read(path)
        _check_same(profile, measuring, path)
        _print(f"{path} is there and taken")
    else:
        plan = measuring.plan
        for line in measuring.left_out:
            _print(line)
        _print(f"profiling {plan.recipe.name} under {plan.framework}, {plan.np} rank(s)")
        profile = profiling.run(measuring, folder)
    answered = question.of(profile)
    if question.cluster is None:
        clusters.save(answered.cluster, folder / CLUSTER)
        _print(f"no --cluster: the links are those that the profile timed, kept in {folder / CLUSTER}")
    return answered


def _check_same(profile: Profile, wanted: ProfilePlan, path: Path) -> None:
    plan = wanted.plan
    here = {"framework": plan.framework, "ranks": plan.np, "hosts": len(plan.placement.hosts)}
    there = {"framework": profile.framework, "ranks": profile.np, "hosts": profile.hosts}
    different = [f"{there[key]} instead of {here[key]} as {key}" for key in here if there[key] != here[key]]
    # A profile keeps no checkpoints, whatever its recipe says.
    if profile.settings | {"checkpoint": None} != wanted.given.model_dump(mode="json") | {"checkpoint": None}:
        different.append("another recipe")
    if different:
        raise RequestError(
            f"--resume: {path} has {', '.join(different)}; give --overwrite to measure again, or another --out"
        )


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
