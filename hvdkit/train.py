"""One run of a recipe under one framework: checked in full, launched, watched, its result read."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdkit import config, paths, ranks, rivals
from hvdkit.adapters.declared import CAPABILITIES
from hvdkit.config import Recipe
from hvdkit.core import tuning
from hvdkit.core.precision import gaps
from hvdkit.core.topology import threads_per_rank
from hvdkit.errors import RequestError, RunError, Stopped
from hvdkit.files import write_atomic
from hvdkit.launch import LAUNCHERS
from hvdkit.launch.ends import RankFailure
from hvdkit.launch.hosts import Host, discovered
from hvdkit.launch.job import Elastic, Job
from hvdkit.results import MetricLine, TrainResult, read_result
from hvdkit.runtimes.store import Runtime

Watch = Callable[[MetricLine], None]
FAREWELL_S = 25.0  # for a checkpoint behind SIGTERM; with the end of all ranks it stays below 30 s


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
    rival: str | None = None  # of hvdkit.rivals: by what other means
    pinned: bool = False  # each rank gets cores of its own, where there are enough
    settings: Mapping[str, str] = field(default_factory=dict)  # of the ranks' environment, found by measuring
    began: float | None = None  # by the wall clock, where starting counts from before the launch: with the command

    def by(self, script: Path) -> Plan:
        """The same, by another script."""
        return replace(self, script=script)


def plan(
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
    runtime, placed, faults = ranks.check(framework, np, hosts, launcher, stall_timeout_s, elastic)
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
        faults += rivals.check([rival], [framework], [np])
    if faults or runtime is None:
        raise RequestError("\n".join(faults))
    if rival is not None:
        rivals.check_recipe(rival, recipe, not any(host.namespace or not host.here for host in placed))
    return Plan(recipe, framework, runtime, np, placed, launcher, stall_timeout_s, discovery=discovery, rival=rival)


def _gaps(recipe: Recipe, framework: str, runtime: Runtime) -> list[str]:
    """What the framework cannot do of the recipe on any device that it may find there; the ranks know which it is."""
    device = recipe.device
    if device == "auto" and not runtime.gpu and not runtime.added:
        device = "cpu"
    devices = ("cpu", "gpu") if device == "auto" else (device,)
    found = [gaps(framework, CAPABILITIES[framework], recipe, each) for each in devices]
    return min(found, key=len)


def run(plan: Plan, folder: Path, watch: Watch | None = None, resume: bool = False) -> TrainResult:
    """Run to the end, writing into `folder` (absolute, there and empty); `watch` sees each line of metrics.jsonl.

    With `resume` the folder may hold an earlier run of the recipe: it goes on from its newest checkpoint, and one that
    had come to its end gives its result again.
    Raises what the launcher raises: a rank's failure, a fault that only a rank could find, an interrupt; and Stopped
    where SIGTERM ended training behind a checkpoint.
    """
    result = folder / "result.json"
    if resume:
        done = finished(plan, folder)
        if done:
            return done
        from hvdkit.core.resume import pick  # NumPy comes with it

        found, complaints = pick(folder / "checkpoints", plan.recipe)
        step = f"step {found.record.progress.step}" if found else "the beginning: there is no checkpoint"
        for line in [*complaints, f"{folder}: goes on from {step}"]:
            print(line, file=sys.stderr, flush=True)
        result.unlink(missing_ok=True)  # of a shorter run, or with other settings that may change
    from hvdkit import tune  # which launches short runs from here

    plan = tune.measured(plan, folder)
    write_atomic(folder / "config.yaml", config.dump(plan.recipe))
    tail = _Tail(folder / "metrics.jsonl", watch)
    arguments = ["--out", str(folder), *(["--resume"] if resume else [])]
    farewell_s = FAREWELL_S if plan.recipe.checkpoint else 0.0
    bounds = plan.recipe.elastic
    elastic = Elastic(bounds.min_np, bounds.max_np, plan.discovery) if bounds else None
    launch(plan, folder / "config.yaml", arguments, folder / "logs", tail.poll, farewell_s, elastic)
    tail.poll()
    if not result.exists():
        kept = sorted((folder / "checkpoints").glob("step-*"))
        raise Stopped(f"stopped by SIGTERM behind {kept[-1] if kept else 'no checkpoint'}; go on with --resume")
    return read_result(result)


def finished(plan: Plan, folder: Path) -> TrainResult | None:
    """The result of an earlier run in the folder, if it was the plan's and came to its end."""
    try:
        same = config.load(folder / "config.yaml") == plan.recipe
        result = read_result(folder / "result.json") if same and (folder / "result.json").exists() else None
    except RequestError:
        return None
    if result is None or (result.framework, result.rival) != (plan.framework, plan.rival):
        return None
    return result if plan.recipe.elastic or result.np == plan.np else None  # elastic runs may have lost some


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


class _Tail:
    """Hands each new whole line of a growing metrics.jsonl to `watch`.

    Rank 0 replaces the file when it starts, by what of an earlier run counts: what is there now is not looked at.
    """

    def __init__(self, path: Path, watch: Watch | None) -> None:
        self._path, self._watch, self._offset = path, watch, 0
        self._old = path.stat().st_ino if path.exists() else None
        self._now: int | None = None

    def poll(self) -> None:
        """Read what has come since the last call."""
        if self._watch is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if number == self._old:
                return
            if number != self._now:  # replaced again, by the first rank of an elastic run that goes on
                self._now, self._offset = number, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                self._offset += len(line)
                self._watch(MetricLine.model_validate_json(line))
