"""A run of a recipe under one framework: checked in full before anything starts, then launched."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdkit import paths
from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.baselines import registry
from hvdkit.commands import placement
from hvdkit.core import tuning
from hvdkit.core.precision import gaps
from hvdkit.core.topology import threads_per_rank
from hvdkit.errors import RequestError, RunError
from hvdkit.launch.diagnosis.exits import RankFailure
from hvdkit.launch.hosts import Host, discovered
from hvdkit.launch.job import Elastic, Job
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.recipe.schema import Recipe
from hvdkit.runtimes.store import Runtime


@dataclass(frozen=True)
class Plan:
    """A run that has passed every check that can be made before it starts."""

    recipe: Recipe
    framework: str
    runtime: Runtime
    np: int
    hosts: list[Host]
    launcher: str
    stall_timeout_s: float
    script: Path | None = None  # another script than the recipe's own
    discovery: Path | None = None  # prints the hosts that an elastic run may have now
    rival: str | None = None  # of hvdkit.baselines.registry: by what other means
    pinned: bool = False  # each rank gets cores of its own, where there are enough
    settings: Mapping[str, str] = field(default_factory=dict)  # of the ranks' environment, found by measuring
    began: float | None = None  # by the wall clock, where starting counts from before the launch: with the command

    def by(self, script: Path) -> Plan:
        """The same, by another script."""
        return replace(self, script=script)


def make_plan(
    recipe: Recipe,
    framework: str,
    np: int,
    hosts: str | None,
    launcher: str,
    stall_timeout_s: float = 60.0,
    discovery: Path | None = None,
    rival: str | None = None,
) -> Plan:
    """Check framework, runtime, ranks, hosts, launcher, rival. Raises RequestError with the first fault of each."""
    elastic = recipe.elastic is not None
    runtime, placed, faults = placement.check(framework, np, hosts, launcher, stall_timeout_s, elastic)
    if recipe.elastic and not recipe.elastic.min_np <= np <= recipe.elastic.max_np:
        faults.append(f"-np {np}: expected {recipe.elastic.min_np} to {recipe.elastic.max_np}, as elastic says")
    if recipe.elastic and "HOROVOD_CYCLE_TIME" in os.environ:
        faults.append("HOROVOD_CYCLE_TIME: expected not to be set in an elastic run; Horovod mixes it up as ranks join")
    if discovery is not None and recipe.elastic is None:
        faults.append("--host-discovery-script: expected an `elastic` section in the recipe")
    elif discovery is not None and not (os.access(discovery, os.X_OK) and discovery.is_file()):
        faults.append(f"--host-discovery-script {discovery}: expected a program that prints host:slots a line")
    elif discovery is not None:
        try:
            discovered(discovery.absolute(), here=launcher == "direct")
        except RequestError as error:
            faults.append(str(error))
    if runtime is not None:
        faults += _gaps(recipe, framework, runtime)
    if rival is not None:
        faults += registry.check([rival], [framework], [np])
    if faults or runtime is None:
        raise RequestError("\n".join(faults))
    if rival is not None:
        registry.check_recipe(rival, recipe, not any(host.namespace or not host.here for host in placed))
    return Plan(recipe, framework, runtime, np, placed, launcher, stall_timeout_s, discovery=discovery, rival=rival)


def _gaps(recipe: Recipe, framework: str, runtime: Runtime) -> list[str]:
    """What the framework cannot do of the recipe on any device that it may find there; the ranks know which it is."""
    device = recipe.device
    if device == "auto" and not runtime.gpu and not runtime.added:
        device = "cpu"
    devices = ("cpu", "gpu") if device == "auto" else (device,)
    found = [gaps(framework, CAPABILITIES[framework], recipe, each) for each in devices]
    return min(found, key=len)


def launch(
    plan: Plan,
    recipe: Path,
    arguments: list[str],
    log_dir: Path,
    on_tick: Callable[[], None] | None = None,
    farewell_s: float = 0.0,
    elastic: Elastic | None = None,
) -> None:
    """Start the ranks of the plan's framework on the recipe file, with further arguments, and see them to their end.

    On SIGTERM they have `farewell_s` to end in good order; with `elastic` lost ranks are survived.

    Raises as `run` does.
    """
    job = Job(
        python=plan.runtime.python,
        arguments=[str(plan.script or paths.script(plan.framework)), str(recipe), *arguments, *_rival(plan)],
        np=plan.np,
        hosts=plan.hosts,
        environment=plan.runtime.environment | _environment(plan),
        log_dir=log_dir,
        stall_timeout_s=plan.stall_timeout_s,
        farewell_s=farewell_s,
        elastic=elastic,
    )
    try:
        LAUNCHERS[plan.launcher](job, on_tick)
    except RankFailure as failure:
        raise _with_remedy(failure, plan) from None


def _environment(plan: Plan) -> dict[str, str]:
    """Thread counts must stand in the environment before a framework loads; another host may have other cores."""
    environment = {"HVDKIT_LAUNCHER": plan.launcher, "HVDKIT_STARTED": str(plan.began or time.time())}
    if plan.pinned:
        environment["HVDKIT_PIN"] = "1"
    if len(plan.hosts) == 1 or any(host.namespace for host in plan.hosts):
        requested = None if plan.recipe.threads == "auto" else plan.recipe.threads
        environment["OMP_NUM_THREADS"] = str(threads_per_rank(requested, plan.np))
    environment |= plan.settings
    if plan.rival is None:
        environment |= tuning.environment(plan.recipe, {**os.environ, **plan.runtime.environment, **environment})
    return environment


def _rival(plan: Plan) -> list[str]:
    return ["--rival", plan.rival] if plan.rival else []


def _with_remedy(failure: RankFailure, plan: Plan) -> RunError:
    """A rank that could not even import is a matter of its runtime, and doctor knows more."""
    lost = re.findall(r"^\s*((?:ModuleNotFound|Import)Error: .*)$", str(failure), flags=re.MULTILINE)
    if not lost or failure.record:  # hvdkit's own code ran, so the import belongs to the training
        return failure
    return RunError(
        f"rank {failure.rank} on {failure.host}: the runtime {plan.runtime.name!r} ({plan.runtime.python}) is broken: "
        f"{lost[-1]}; look with `hvdkit doctor`"
    )
