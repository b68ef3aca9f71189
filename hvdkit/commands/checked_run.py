"""A run of a recipe under one framework: checked in full before anything starts, then launched and followed."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import ValidationError

from hvdkit import paths, tasks
from hvdkit.adapters.capabilities import CAPABILITIES, unsupported
from hvdkit.baselines import registry
from hvdkit.commands import checks, own_script
from hvdkit.commands.checks import Use
from hvdkit.commands.debug_logs import VARIABLES, collected
from hvdkit.core import cuts
from hvdkit.core.group import coordinates, threads_per_rank
from hvdkit.core.step_plan import StepPlan
from hvdkit.data.counts import Counts
from hvdkit.errors import Faults, HvdkitError, RequestError, RunError
from hvdkit.files import open_regular
from hvdkit.heartbeat import NOTED
from hvdkit.launch.diagnosis.blame import LESS_MEMORY
from hvdkit.launch.diagnosis.exits import RankFailure
from hvdkit.launch.job import ElasticBounds, Job
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.launch.placement import Placement
from hvdkit.recipe import parallel
from hvdkit.recipe.communication import Parallel
from hvdkit.recipe.schema import OwnModel, Recipe
from hvdkit.results.train import MetricLine
from hvdkit.runtimes import machine
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.runtimes.store import Runtime, find, load
from hvdkit.worker import tuning
from hvdkit.worker.unreached import unreached

Watch = Callable[[MetricLine], None]
_REMOVED = "removed or replaced while the run writes it; rank 0 writes it again, with all lines"
_CUT = "cut short while the run writes it; the lines so far are gone"
_POLL_S = 0.2  # a resumed run may have millions of lines


@dataclass(frozen=True)
class CheckedRun:
    """A run that has passed every check that can be made before it starts."""

    recipe: Recipe
    framework: str
    runtime: Runtime
    placement: Placement
    script: Path | None = None  # replaces the recipe's own
    rival: str | None = None  # of hvdkit.baselines.registry
    pinned: bool = False  # each rank gets cores of its own, where there are enough
    settings: Mapping[str, str] = field(default_factory=dict)  # of the ranks' environment, found by measuring
    samples: Counts | None = None  # in the recipe's data, as far as that is known
    notes: tuple[str, ...] = ()  # how a file of weights is read
    began: float | None = None  # wall-clock time at which the command began, where starting counts from then

    @property
    def np(self) -> int:
        """The number of ranks."""
        return self.placement.np

    @property
    def title(self) -> str:
        """What is shown of it while it runs."""
        by = f", {self.rival}" if self.rival else ""
        if self.rival and not registry.RIVALS[self.rival].averaging:  # each process trains alone; the lines are of one
            return f"{self.framework}{by}, one of {self.np}"
        since = "begun with " if self.recipe.elastic else ""  # their number may change
        return f"{self.framework}{by}, {since}{self.np} rank{'s' if self.np > 1 else ''}"

    @property
    def warnings(self) -> list[str]:
        """Lines to show before the run."""
        on_gpus = self.recipe.device == "gpu" or (self.recipe.device == "auto" and self.runtime.gpu)
        left_out = self.samples.left_out if self.samples else ()
        return [*left_out, *self.notes, *([] if on_gpus else self.placement.crowding)]

    @property
    def unreached(self) -> list[str]:
        """Lines for what the recipe asks for and never happens in training; the ranks have them where samples are not
        known yet."""
        if self.samples is None or self.recipe.finds_batch_size:
            return []
        return unreached(StepPlan(self.recipe, self.samples.train, checks.data_ranks(self.recipe, self.np, self.rival)))

    def by(self, script: Path) -> CheckedRun:
        """The same run with another script."""
        return replace(self, script=script)


def make_plan(
    recipe: Recipe, framework: str | None, placement: Placement, rival: str | None = None, use: Use = "train"
) -> CheckedRun:
    """Check framework, runtime, placement, rival, and the data by its `use`. Raises RequestError with all faults.

    Without a `framework` it is that of the recipe's script, or else the default.
    """
    np, elastic = placement.np, recipe.elastic
    faults, framework = Faults(), framework or own_script.framework_for(recipe, None)
    with faults.collected():
        own_script.framework_for(recipe, framework)
    with faults.collected():
        runtime = find(framework, registry.runtime_of(rival))
        device = recipe.device
        if device == "auto" and not runtime.gpu and not runtime.added:
            device = "cpu"
        devices = ("cpu", "gpu") if device == "auto" else (device,)  # only the ranks know which it is
        # What a rival has of both is checked below: it shards by itself.
        own = recipe if rival is None else recipe.model_copy(update={"sharding": "none", "parallel": Parallel()})
        faults += sorted((unsupported(framework, CAPABILITIES[framework], own, kind) for kind in devices), key=len)[0]
    faults += placement.faults(framework, elastic is not None)
    with faults.collected():
        parallel.check_ranks(recipe.parallel, np)
    if elastic and not elastic.min_np <= np <= elastic.max_np:
        faults.append(f"-np {np}: expected {elastic.min_np} to {elastic.max_np}, as elastic says")
    if elastic and "HOROVOD_CYCLE_TIME" in os.environ:
        faults.append("HOROVOD_CYCLE_TIME: expected not to be set in an elastic run; Horovod mixes it up as ranks join")
    if rival is not None:
        faults += registry.check([rival], [framework], [np])
        faults += ["batch_size: expected a number with --rival, got auto"] if recipe.finds_batch_size else []
    if isinstance(recipe.model, OwnModel) and not (script := Path(recipe.model.script)).is_file():
        where = "" if script.is_absolute() else f", neither beside the recipe nor in {Path.cwd()}"
        faults.append(f"model.script: {script}: no such file{where}; expected a Python script (docs/own-model.md)")
    notes: list[str] = []
    with faults.collected():
        samples = checks.check(recipe, framework, placement, use, rival if rival in registry.RIVALS else None, notes)
    faults.report()
    if rival is not None:
        registry.check_recipe(rival, recipe, placement.here)
    elif use == "train" and placement.here and recipe.parallel.pipeline > 1:
        recipe = _cut(recipe, framework, np, samples, notes)
    return CheckedRun(recipe, framework, runtime, placement, rival=rival, samples=samples, notes=tuple(notes))


def _cut(recipe: Recipe, framework: str, np: int, samples: Counts | None, notes: list[str]) -> Recipe:
    """The recipe, whose stages fit into this machine's memory, if need be by another cut than the fastest.

    Raises RequestError where no cut does.
    """
    from hvdkit.simulator import memory  # most models are whole

    axes, shape, room = recipe.parallel, samples.shape if samples else None, machine.memory() // np
    if isinstance(recipe.model, OwnModel) or axes.split != "auto" or not shape:
        return recipe  # what its stages need is not known
    fastest = cuts.resolved(recipe, tasks.choose(recipe).architecture(shape)).split
    split = memory.cut_within(recipe, shape, framework, False, recipe.data_ranks(np), room)
    if split is None:
        needs = memory.parts(recipe, shape, framework, False, recipe.data_ranks(np), recipe.sharding).total
        raise RequestError(
            f"parallel.split: expected a cut into {axes.pipeline} stages of which each fits into {room / 2**20:,.0f} "
            f"MiB, this machine's memory over {np} ranks; the fullest stage needs at least {needs / 2**20:,.0f}; "
            "give a smaller batch_size, or look with `hvdkit plan`"
        )
    if split != fastest:
        notes.append(f"parallel.split: {split} in place of {fastest}, so that each stage fits into memory")
        axes = axes.model_copy(update={"split": split})
    return recipe.model_copy(update={"parallel": axes})


def of_checkpoint(recipe: Recipe, writer: str, given: str | None, placement: Placement, use: Use) -> CheckedRun:
    """The run of a checkpoint's recipe, under the framework that is `given`, or else under its `writer`'s.

    hvdkit's own models run under another framework if the writer's has no runtime here. How many ranks trained it, and
    what each had of it, does not matter here.
    """
    recipe = recipe.model_copy(update={"elastic": None, "sharding": "none", "parallel": Parallel()})
    others = () if isinstance(recipe.model, OwnModel) else FRAMEWORKS
    built = (name for name in (writer, *others) if name in FRAMEWORKS and load(FRAMEWORKS[name]))
    return make_plan(recipe, given or next(built, writer), placement, use=use)


def launch(
    plan: CheckedRun,
    recipe: Path,
    arguments: list[str],
    log_dir: Path,
    on_tick: Callable[[], None] | None = None,
    preemption_grace_s: float = 0.0,
) -> None:
    """Start the plan's ranks on the recipe file with further arguments, and wait for them to end.

    On SIGTERM they have `preemption_grace_s` seconds to end by themselves. Where the plan's recipe is elastic, lost
    ranks are survived.

    Raises what the launcher raises.
    """
    placement, bounds = plan.placement, plan.recipe.elastic
    rival = ["--rival", plan.rival] if plan.rival else []
    job = Job(
        python=plan.runtime.python,
        arguments=[*program(plan), str(recipe), *arguments, *rival],
        np=placement.np,
        hosts=placement.hosts,
        environment=plan.runtime.environment | environment(plan),
        log_dir=log_dir,
        stall_timeout_s=placement.stall_timeout_s,
        preemption_grace_s=preemption_grace_s,
        reports_done=True,
        elastic=ElasticBounds(bounds.min_np, bounds.max_np, placement.discovery) if bounds else None,
    )
    try:
        LAUNCHERS[placement.launcher].run(job, on_tick)
    except RankFailure as failure:
        raise _with_remedy(_fitting(_placed(failure, plan), plan), plan) from None
    finally:
        if placement.debug:
            collected(job)


def program(plan: CheckedRun) -> list[str]:
    """The program of the plan's ranks: a script, with arguments that come before the recipe."""
    model = plan.recipe.model
    if plan.script is not None:
        return [str(plan.script)]
    if isinstance(model, OwnModel):
        return [str(paths.program("own_task")), plan.framework, model.script]
    return [str(paths.script(plan.framework, model.SCRIPT))]


def environment(plan: CheckedRun) -> dict[str, str]:
    """What the run adds to the ranks' environment: a framework reads its number of threads when it is loaded."""
    added = {"HVDKIT_LAUNCHER": plan.placement.launcher, "HVDKIT_STARTED": str(plan.began or time.time())}
    if plan.samples is not None and not plan.recipe.finds_batch_size:
        added[NOTED] = "1"
    if "PYTHONHASHSEED" not in os.environ:  # all ranks, and later runs, then go through a set in the same order
        added["PYTHONHASHSEED"] = "0"
    if plan.pinned:
        added["HVDKIT_PIN"] = "1"
    if len(plan.placement.hosts) == 1:  # another machine may have other cores
        requested = None if plan.recipe.threads == "auto" else plan.recipe.threads
        added["OMP_NUM_THREADS"] = str(threads_per_rank(requested, plan.np))
    if plan.placement.debug:
        added |= {name: value for name, value in VARIABLES.items() if name not in os.environ}
    added |= plan.settings
    if plan.rival is None:
        added |= tuning.environment(plan.recipe, {**os.environ, **plan.runtime.environment, **added})
    return added


def _placed(failure: RankFailure, plan: CheckedRun) -> RankFailure:
    """The failure, whose ranks are named with their place in the mesh, where one has other layers than another."""
    axes = plan.recipe.parallel
    if axes.divides:

        def place(named: re.Match[str]) -> str:
            data, stage, part = coordinates(int(named[1]), plan.np, axes.pipeline, axes.tensor)
            return f"{named[0]} (data {data}, pipeline {stage}, tensor {part})"

        what, stop, log = str(failure).partition("; all ranks were ended")
        failure.args = (re.sub(r"\brank (\d+) on [^\s,;:]+", place, what) + stop + log,)
    return failure


def _fitting(failure: RankFailure, plan: CheckedRun) -> RankFailure:
    """The failure; where memory was what lacked, with what would need less of it, by the count of `hvdkit memory`."""
    if LESS_MEMORY not in str(failure) or plan.rival is not None or isinstance(plan.recipe.model, OwnModel):
        return failure  # of a script's own model only the ranks know the size
    from hvdkit.simulator import ladder, memory  # most runs do not fail so

    placement, gpu = plan.placement, plan.recipe.device == "gpu" or bool(plan.runtime.gpu and machine.gpus())
    here = max(1, -(-plan.np // len(placement.hosts)))
    room = None
    if placement.here:
        room = memory.usable(min(machine.gpu_memory(), default=0), gpu) if gpu else machine.memory() // here
    situation = ladder.Situation(plan.recipe, plan.np, here, plan.framework, gpu, room)
    with suppress(HvdkitError):
        if less := ladder.remedies(situation):
            failure.args = (str(failure).replace(LESS_MEMORY, f"{LESS_MEMORY}: {less}"),)
    return failure


def _with_remedy(failure: RankFailure, plan: CheckedRun) -> RunError:
    """A failed import means a broken runtime: the error then names the runtime and `hvdkit doctor`."""
    lost = re.findall(r"^\s*((?:ModuleNotFound|Import)Error: .*)$", str(failure), flags=re.MULTILINE)
    if not lost or failure.record:  # hvdkit's own code ran, so the import belongs to the training
        return failure
    return RunError(
        f"rank {failure.rank} on {failure.host}: the runtime {plan.runtime.name!r} ({plan.runtime.python}) is broken: "
        f"{lost[-1]}; look with `hvdkit doctor`"
    )


class MetricsTail:
    """Passes each new complete line of a growing metrics.jsonl to `watch`.

    Rank 0 replaces the file when it starts, with the lines of an earlier run that are still valid. A file that is there
    before is not read.
    """

    def __init__(self, path: Path, watch: Watch | None) -> None:
        self._path, self._watch, self._offset = path, watch, 0
        self._read = b""  # the newest line
        self._old = path.stat().st_ino if path.exists() else None
        self._now: int | None = None
        self._lost = ""

    def lost(self) -> str:
        """What happened to the file while it was followed, since the last call; empty if nothing did."""
        lost, self._lost = self._lost, ""
        return lost

    def poll(self, last: bool = False) -> None:
        """Read what has come since the last call, as far as `_POLL_S` allows; all of it if this is the `last` one."""
        if self._watch is None:
            return
        until = float("inf") if last else time.monotonic() + _POLL_S
        if self._now is not None and not self._path.exists():
            self._lost, self._now = _REMOVED, None
        with suppress(OSError), open_regular(self._path) as file:
            number = os.fstat(file.fileno()).st_ino
            if number == self._old:
                return
            if number != self._now:  # with lines, it was removed, or ranks of an elastic run continue
                self._lost = _REMOVED if self._now is not None and self._read else self._lost
                file.seek(self._offset - len(self._read))
                if file.read(len(self._read)) != self._read:
                    self._offset = 0
                self._now = number
            if os.fstat(file.fileno()).st_size < self._offset:
                self._lost, self._offset = _CUT, 0
            file.seek(self._offset)
            while time.monotonic() < until and (line := file.readline()).endswith(b"\n"):  # else still being written
                self._offset += len(line)
                self._read = line
                with suppress(ValidationError):
                    self._watch(MetricLine.model_validate_json(line))
