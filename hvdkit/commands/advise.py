"""`hvdkit advise RECIPE`: the whole chain. A recipe is profiled, or was in an earlier run, and its advice follows."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from hvdkit.commands import predict
from hvdkit.commands import profile as profiling
from hvdkit.commands.predict import Plan, Question
from hvdkit.commands.profile import ProfilePlan
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Recipe
from hvdkit.results.profile import Profile
from hvdkit.simulator import cluster as clusters

CLUSTER = "cluster.yaml"


@dataclass(frozen=True)
class Chain:
    """A chain that has passed every check that can be made before it starts."""

    measuring: ProfilePlan
    question: Question


def plan(
    recipe: Recipe,
    question: Question,
    framework: str,
    np: int,
    hosts: str | None,
    launcher: str,
    stall_timeout_s: float,
    steps: int,
) -> Chain:
    """Check what was asked for. Raises RequestError with all its faults."""
    faults = []
    if question.cluster is None and np == 1:
        faults.append(f"--cluster: {predict.NO_LINKS}; or -np 2 or more, whose own links are taken")
    measuring = None
    try:
        measuring = profiling.plan(recipe, framework, np, hosts, launcher, stall_timeout_s, steps)
    except RequestError as error:
        faults += str(error).splitlines()
    if faults or measuring is None:
        raise RequestError("\n".join(faults))
    return Chain(measuring, question)


def run(chain: Chain, folder: Path) -> Plan:
    """The question of a profile that is measured into `folder`, or is there already.

    Where no cluster was named, the links that were timed are kept as `cluster.yaml`. Raises as `profile.run` does, and
    RequestError where the profile that is there is another one's.
    """
    path = folder / profiling.FILE
    if path.exists():
        found = predict.read(path)
        _check_same(found, chain.measuring, path)
        _say(f"{path} is there and taken")
    else:
        asked = chain.measuring.plan
        for line in chain.measuring.left_out:
            _say(line)
        _say(f"profiling {asked.recipe.name} under {asked.framework}, {asked.np} rank(s)")
        found = profiling.run(chain.measuring, folder)
    made = chain.question.of(found)
    if chain.question.cluster is None:
        clusters.save(made.cluster, folder / CLUSTER)
        _say(f"no --cluster: the links are those that the profile timed, kept in {folder / CLUSTER}")
    return made


def _check_same(found: Profile, wanted: ProfilePlan, path: Path) -> None:
    plan = wanted.plan
    asked = {"framework": plan.framework, "ranks": plan.np, "hosts": len(plan.hosts)}
    there = {"framework": found.framework, "ranks": found.np, "hosts": found.hosts}
    different = [f"{there[key]} instead of {asked[key]} as {key}" for key in asked if there[key] != asked[key]]
    # A profile keeps no checkpoints, whatever its recipe says.
    if found.settings | {"checkpoint": None} != wanted.asked.model_dump(mode="json") | {"checkpoint": None}:
        different.append("another recipe")
    if different:
        told = ", ".join(different)
        raise RequestError(f"--resume: {path} has {told}; give --overwrite to measure again, or another --out")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
