"""`--dry-run`: what a command would start, from the plans that it has checked."""

from __future__ import annotations

import json
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hvdkit import tasks
from hvdkit.adapters.capabilities import CHOSEN as OF_ADAPTERS
from hvdkit.adapters.capabilities import chosen
from hvdkit.commands.checked_run import CheckedRun, environment, program
from hvdkit.commands.checks import data_ranks
from hvdkit.core import cuts
from hvdkit.core.step_plan import StepPlan
from hvdkit.errors import RequestError
from hvdkit.heartbeat import NOTED
from hvdkit.recipe import parallel, schema, yaml_files
from hvdkit.recipe.data import MOST_FOUND
from hvdkit.recipe.schema import ImageFolder, Recipe, flat
from hvdkit.report import mesh
from hvdkit.report.tabular import Cell, Table, markdown, number, on_hosts, percent, size
from hvdkit.results.dry_run import DryRun, PlannedRank, PlannedRun
from hvdkit.results.memory import Parts
from hvdkit.results.train import PlannedStage, TrainResult
from hvdkit.runtimes import machine
from hvdkit.simulator import memory
from hvdkit.tasks import few_samples
from hvdkit.worker import stages
from hvdkit.worker.tuning import CHOSEN, SHARED, listed

_MOST_RANKS = 8  # named one by one
_BAR = 24  # characters
# Keys of a recipe that do not change how long a step takes; the number of threads is in the result.
_ANY_SPEED = {
    "name", "epochs", "steps", "seed", "schedule", "loss", "checkpoint", "log_every", "tensorboard", "warmup_steps",
    "threads", "elastic", "tune", "early_stopping",
}  # fmt: skip
_DECODING_S = 20.0  # seconds for decoding images
_MOST_DAMAGED = 10  # named one by one
_MOST_FORMER = 500  # results that are looked at for one of the same recipe


def dry_run(function: Callable[..., Any], /, *arguments: Any, **options: Any) -> DryRun:
    """What `train`, `compare`, `parity` or `profile` would start with these arguments; starts and writes nothing."""
    if isinstance(function, partial):
        return dry_run(function.func, *function.args, *arguments, **{**function.keywords, **options})
    preview = getattr(function, "preview", None)
    if preview is None:
        raise RequestError(f"dry_run: expected hvdkit's train, compare, parity or profile, got {function!r}")
    return preview(*arguments, **options)  # type: ignore[no-any-return]


def described(
    command: str, recipe: Recipe, out: Path, plans: Sequence[tuple[CheckedRun, int]], notes: Iterable[str] = ()
) -> DryRun:
    """What a command with this recipe would start: each plan so many times."""
    former = _former_results([Path("runs"), out.parent])
    runs = [_run(plan, times, former) for plan, times in plans]
    lines = [*notes, *(line for plan, _ in plans for line in plan.warnings)]
    lines += [line for (plan, _), run in zip(plans, runs, strict=True) for line in _too_large(plan, run.memory)]
    lines += [line for plan, _ in plans for line in _few_samples(plan)]
    lines += _images(plans[0][0])
    if recipe.finds_batch_size:
        most = recipe.max_batch_size or MOST_FOUND
        lines.append(f"batch_size: found when the run starts: the largest that fits, up to {most:,}")
    once = list(dict.fromkeys(lines))
    return DryRun(command=command, recipe=recipe.model_dump(mode="json"), out=str(out), runs=runs, notes=once)


def _run(plan: CheckedRun, times: int, former: list[tuple[Path, TrainResult]]) -> PlannedRun:
    recipe, samples, placement = plan.recipe, plan.samples, plan.placement
    size = data_ranks(plan.recipe, plan.np, plan.rival)
    steps = StepPlan(recipe, samples.train, size) if samples and not recipe.finds_batch_size else None
    added = environment(plan)
    added.pop("HVDKIT_STARTED")
    added.pop(NOTED, None)
    tuning: dict[str, dict[str, Any]] = json.loads(added.pop(CHOSEN, "{}"))
    device = "gpu" if recipe.device == "gpu" else "cpu"
    if plan.rival is None and (recipe.device != "auto" or not plan.runtime.gpu):
        tuning |= listed({}, chosen(OF_ADAPTERS[plan.framework][device], recipe), recipe.model.TASK)
    threads = int(added["OMP_NUM_THREADS"]) if "OMP_NUM_THREADS" in added else None
    seconds, seconds_from = _seconds(plan, steps, threads, former)
    return PlannedRun(
        title=plan.title,
        framework=plan.framework,
        rival=plan.rival,
        times=times,
        launcher=placement.launcher,
        ranks=[PlannedRank(rank=rank.rank, host=rank.hostname, slot=rank.local_rank) for rank in placement.places],
        within_hosts=_within_hosts(plan),
        interpreter=str(plan.runtime.python),
        versions=plan.runtime.versions,
        script=program(plan)[0],
        threads=threads,
        environment=plan.runtime.environment | added,
        tuning=tuning,
        train=samples.train if samples else None,
        val=samples.val if samples else None,
        shape=list(samples.shape) if samples else None,
        global_batch=0 if recipe.finds_batch_size else recipe.batch_size * size,
        steps_per_epoch=steps.steps_per_epoch if steps else None,
        epochs=steps.epochs if steps else None,
        steps=steps.total_steps if steps else recipe.steps,
        stages=_stages(plan),
        memory=_memory(plan),
        seconds=seconds,
        seconds_from=seconds_from,
    )


def _within_hosts(plan: CheckedRun) -> str | None:
    """How ranks of one host will exchange tensors on CPUs, and why; None for one rank, on GPUs and with a rival."""
    if plan.rival is not None or plan.np == 1 or _on_gpus(plan):
        return None
    here = {host.name for host in plan.placement.hosts if host.here}
    ranks = Counter("" if rank.hostname in here else rank.hostname for rank in plan.placement.places)
    fewest, most = min(ranks.values()), max(ranks.values())
    if {**os.environ, **plan.runtime.environment}.get(SHARED, "1") == "0":
        return f"sockets, as {SHARED} is 0"
    if most == 1:
        return "each has one rank"
    if fewest < most:
        return f"sockets, as hosts have unequal numbers of ranks, {fewest} to {most}"
    between = "" if len(ranks) == 1 else f" by the {most} ranks of each, and sockets between hosts"
    return f"shared memory{between}; {SHARED}=0 turns it off"


def _stages(plan: CheckedRun) -> list[PlannedStage] | None:
    """The stages of a model that is divided over ranks, with their ranks and hosts."""
    axes = plan.recipe.parallel
    if not axes.divides or plan.rival is not None:
        return None
    hosts = [rank.hostname for rank in plan.placement.places]
    shape = plan.samples.shape if plan.samples else None
    table = tasks.choose(plan.recipe).architecture(shape)
    found = stages.planned(table, cuts.resolved(plan.recipe, table), hosts, cuts.passes_of(plan.recipe))
    if axes.pipeline > 1 and table.work_by_block():
        ranks, gpu = data_ranks(plan.recipe, plan.np, plan.rival), _on_gpus(plan)
        for number, stage in enumerate(found):
            needs = memory.parts_of_stage(plan.recipe, shape, plan.framework, gpu, ranks, plan.recipe.sharding, number)
            stage.needs_bytes = needs.total
    return found


def _memory(plan: CheckedRun) -> Parts | None:
    """What the rank with the most keeps; None where only the script knows the model."""
    recipe, shape = plan.recipe, plan.samples.shape if plan.samples else None
    ranks = data_ranks(plan.recipe, plan.np, plan.rival)
    if recipe.finds_batch_size or (recipe.model.TASK == "own" and recipe.parallel.divides):
        return None
    parts = memory.parts(recipe, shape, plan.framework, _on_gpus(plan), ranks, recipe.sharding)
    return parts if parts.parameters else None


def _on_gpus(plan: CheckedRun) -> bool:
    return plan.recipe.device == "gpu" or (plan.recipe.device == "auto" and plan.runtime.gpu and bool(machine.gpus()))


def _too_large(plan: CheckedRun, needs: Parts | None) -> list[str]:
    """A line if the ranks on this machine need more memory than it has, or one of them more than its GPU."""
    if needs is None or not plan.placement.here:
        return []
    if _on_gpus(plan):
        ranks, limit, of = 1, min(machine.gpu_memory(), default=0), "the smallest GPU"
    else:
        ranks, limit, of = plan.np, machine.memory(), "this machine"
    if not limit or ranks * needs.total <= limit:
        return []
    gib = f"{ranks * needs.total / 2**30:,.1f} GiB"
    who = "a rank needs" if ranks == 1 else f"{ranks} ranks need"
    batch = memory.largest_batch(needs, plan.recipe.batch_size, limit // ranks)
    if batch:
        remedy = f"give batch_size={batch} or less, with accumulate= for the same global batch"
        remedy += "" if plan.recipe.recompute else ", or recompute=true"
    else:
        remedy = "give fewer ranks or a smaller model"
    return [f"memory: {who} at least {gib}, and {of} has {limit / 2**30:,.1f} GiB; {remedy}"]


def _few_samples(plan: CheckedRun) -> list[str]:
    """A line if batch norms see few samples on each of the ranks that train together."""
    model, ranks = plan.recipe.model, data_ranks(plan.recipe, plan.np, plan.rival)
    axes, samples = plan.recipe.parallel, plan.recipe.batch_size
    if plan.recipe.finds_batch_size:
        return []
    if axes.pipeline == 1 or plan.rival is not None:
        return few_samples.warning(model.name, model.batch_norm, samples, ranks)
    parts = parallel.microbatches_of(axes, samples)
    lines = few_samples.warning(model.name, model.batch_norm, samples // parts, max(2, ranks))
    return [f"{line}, or fewer parallel.microbatches" for line in lines]


def _images(plan: CheckedRun) -> list[str]:
    """What decoding the folder's images shows. Raises RequestError for damaged ones where the recipe refuses them."""
    data = plan.recipe.data
    if not isinstance(data, ImageFolder) or not plan.placement.here or not plan.samples:
        return []
    from hvdkit.data import imagefolder

    reasons, looked_at, images = imagefolder.damaged(data, plan.recipe.seed, _DECODING_S)
    shown = [f"{path}: {reason}" for path, reason in reasons.items()]
    if reasons and data.corrupt == "refuse":
        more = [f"{len(reasons) - _MOST_DAMAGED} more images cannot be read"] if len(reasons) > _MOST_DAMAGED else []
        last = "fix or remove them, or give data.corrupt=replace"
        raise RequestError("\n".join([*(f"{line}; {last}" for line in shown[:_MOST_DAMAGED]), *more]))
    every = f"all {images}" if looked_at == images else f"{looked_at} of {images}"
    line = f"images: {every} have been decoded"
    return [
        f"{line}; {len(reasons)} cannot be read, and others take their place, such as {shown[0]}" if reasons else line
    ]


def _former_results(folders: list[Path]) -> list[tuple[Path, TrainResult]]:
    """Results of `hvdkit train` and `compare` in folders below these, the newest first."""
    patterns = ("*/result.json", "*/runs/*/result.json")
    paths = {path.resolve(): path for folder in folders for pattern in patterns for path in folder.glob(pattern)}
    newest = sorted(paths.values(), key=lambda path: path.stat().st_mtime, reverse=True)
    results = []
    for path in newest[:_MOST_FORMER]:
        try:
            results.append((path, TrainResult.read(path)))
        except RequestError:
            continue  # of another version, or damaged
    return results


def _seconds(
    plan: CheckedRun, steps: StepPlan | None, threads: int | None, former: list[tuple[Path, TrainResult]]
) -> tuple[float | None, str]:
    """How long the run takes, and from what this is known."""
    wanted = {"framework": plan.framework, "rival": plan.rival, "np": plan.np, "launcher": plan.placement.launcher}
    wanted |= {"threads": threads} if threads else {}
    for path, result in former if steps else []:
        done = result.steps - result.first_step
        if done < 1 or any(getattr(result, key) != value for key, value in wanted.items()):
            continue
        try:
            same = _of_speed(schema.load(path.parent / "config.yaml")) == _of_speed(plan.recipe)
        except RequestError:
            continue
        if same and steps:
            start_s = result.startup_s or 0.0
            took = f"{path.parent} took {result.train_s:.3g} s for {done} steps, and {start_s:.3g} s to start"
            return start_s + result.train_s * steps.total_steps / done, took
    return None, "found no earlier run of this recipe with this framework, launcher and number of ranks"


def _of_speed(recipe: Recipe) -> dict[str, Any]:
    return {key: value for key, value in flat(recipe).items() if key.partition(".")[0] not in _ANY_SPEED}


def lines(plan: DryRun) -> list[str]:
    """The resolved recipe, then what would be started, a line for each thing."""
    if len(plan.runs) == 1:
        about = _one(plan.runs[0], plan.recipe["parallel"]["tensor"])
    else:
        about = [(run.title, _brief(run)) for run in plan.runs]
        known = [run.seconds * run.times for run in plan.runs if run.seconds is not None]
        if len(known) == len(plan.runs):
            about.append(("time", f"about {_duration(sum(known))} for all runs"))
        about.append(("launcher", plan.runs[0].launcher))
        largest = max(plan.runs, key=lambda run: len(run.ranks))
        about.append(("hosts", on_hosts([rank.host for rank in largest.ranks])))
    about.append(("writes to", plan.out))
    width = max(len(name) for name, _ in about)
    return [
        yaml_files.dump(plan.recipe),
        f"hvdkit {plan.command} would start this; with --dry-run nothing is started or written:",
        *(f"  {name:<{width}}  {text}" for name, text in about),
        *(f"  {line}" for line in _stage_lines(plan.runs[0])),
        *plan.notes,
    ]


def _stage_lines(run: PlannedRun) -> list[str]:
    """A table of a pipeline's stages, with a bar for the work of each; no lines without several."""
    stages = list(enumerate(run.stages or []))
    most = max((_length(stage) for _, stage in stages), default=0.0) or 1.0
    table = Table.of(
        "stages",
        stages,
        {
            "stage": lambda row: number(row[0]),
            "blocks": lambda row: mesh.blocks(row[1].blocks),
            "parameters": lambda row: number(row[1].parameters),
            "a rank needs": lambda row: "–" if row[1].needs_bytes is None else size(row[1].needs_bytes),
            "of the work": lambda row: percent(row[1].work),
            "passes of a step, ms": lambda row: number(row[1].passes_ms, 1),
            "": lambda row: Cell("█" * round(_BAR * _length(row[1]) / most)),
        },
    ).without_empty()
    return markdown(table).splitlines() if len(stages) > 1 else []


def _length(stage: PlannedStage) -> float:
    """Of a stage's bar: its time, or where that is not known its work."""
    return stage.passes_ms or stage.work or 0.0


def _one(run: PlannedRun, tensor: int) -> list[tuple[str, str]]:
    versions = ", ".join(f"{name} {version}" for name, version in run.versions.items())
    about = [
        ("run", run.title),
        ("ranks", _ranks(run)),
        ("launcher", run.launcher),
        ("program", shlex.join([run.interpreter, run.script])),
        ("versions", versions or "not known"),
    ]
    if run.within_hosts:
        about.insert(2, ("in a host", run.within_hosts))
    if run.stages:
        shares_memory = (run.within_hosts or "").startswith("shared memory")
        about += mesh.lines(mesh.DrawnMesh.of(run.stages, tensor, shares_memory))
    if run.threads:
        about.append(("threads", f"{run.threads} per rank"))
    for name, choice in run.tuning.items():
        value = "" if choice["value"] is None else f"{choice['value']}: "  # without a value `why` begins with it
        about.append((name, f"{value}{choice['why']}"))
    if run.train is not None and run.shape is not None:
        shape = "×".join(map(str, run.shape))
        about.append(("data", f"{run.train:,} training and {run.val:,} validation samples of {shape}"))
    else:
        about.append(("data", "only the ranks know how many samples there are"))
    took = "not known" if run.seconds is None else f"about {_duration(run.seconds)}"
    about += [("steps", _steps(run)), ("memory", _memory_line(run)), ("time", f"{took}: {run.seconds_from}")]
    return about


def _brief(run: PlannedRun) -> str:
    times = "once" if run.times == 1 else f"{run.times} times"
    known = "" if run.seconds is None else f", about {_duration(run.seconds)} each"
    return f"{times}, {_count(run.steps)} steps{known}"


def _ranks(run: PlannedRun) -> str:
    if len(run.ranks) <= _MOST_RANKS:
        return ", ".join(f"{rank.rank} on {rank.host} (slot {rank.slot})" for rank in run.ranks)
    return f"{len(run.ranks)}: {on_hosts([rank.host for rank in run.ranks])}"


def _steps(run: PlannedRun) -> str:
    done = f"; {run.first_step} of them are done" if run.first_step else ""
    if not run.global_batch:
        return "as many as the batch allows, which is found when the run starts"
    if run.steps_per_epoch is None:
        steps = "only the ranks know how many" if run.steps is None else f"at most {run.steps:,}"
        return f"{steps}; {run.global_batch} samples per batch{done}"
    if run.epochs is None:
        return f"{_count(run.steps)} in all, an epoch has {run.steps_per_epoch:,}; {run.global_batch} samples per batch"
    epochs = f"{run.epochs} epoch{'' if run.epochs == 1 else 's'}"
    return f"{run.steps:,} in {epochs} of {run.steps_per_epoch:,}; {run.global_batch} samples per batch{done}"


def _memory_line(run: PlannedRun) -> str:
    if not run.global_batch:
        return "known when the batch is"
    if run.memory is None:
        return "not known: only the script knows the model, or its stages have several chunks"
    sizes = [f"{name} {size(value)}" for name, value in run.memory if value]
    return f"a rank needs at least {', '.join(sizes)}, and more for data and scratch space"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _count(number: int | None) -> str:
    return "an unknown number of" if number is None else f"{number:,}"
