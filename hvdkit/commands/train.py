"""`hvdkit train`: one run, its metrics while it runs, and its result."""

from __future__ import annotations

import math
import os
import shlex
import statistics
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import hvdkit
from hvdkit import paths
from hvdkit.commands import fields, tune
from hvdkit.commands.checked_run import CheckedRun, MetricsTail, Watch, launch, make_plan
from hvdkit.commands.loading import loaded
from hvdkit.commands.removed import Removals
from hvdkit.commands.request import Option, say
from hvdkit.errors import RequestError, RunError, Stopped
from hvdkit.files import open_regular, read_bounded, write_atomic
from hvdkit.handlers.metrics_file import is_before
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.report import csv_files
from hvdkit.report.progress import RunProgress
from hvdkit.results.doubts import damage, doubts
from hvdkit.results.dry_run import DryRun
from hvdkit.results.train import (
    MetricLine,
    TrainResult,
    kept_lines,
    read_metrics,
    result_lines,
)
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.tracking import trackers as tracking
from hvdkit.tracking.trackers import Trackers
from hvdkit.usage import process_began

PREEMPTION_GRACE_S = 25.0  # to write a checkpoint after SIGTERM; with the end of all ranks it stays below 30 s


class TrainRequest(fields.StartsRanks):
    """Train a recipe under one framework, on `np` ranks; `hosts` is `"host:slots,…"` or a list of such parts.

    Without a `framework` it is that of the run that is resumed, or of the recipe's script, else PyTorch.
    `log` names trackers: wandb, mlflow, tensorboard.

    Raises Stopped if SIGTERM ended training after a checkpoint.
    """

    recipe: fields.RecipeFile
    overrides: fields.Overrides = None
    framework: Annotated[
        str | None,
        Option(
            fields.FRAMEWORKS_HELP,
            shown="pytorch, or that of the script or of the run to resume",
        ),
    ] = None
    np: fields.Ranks = 1
    rival: Annotated[str | None, Option("train with another method: " + fields.RIVALS)] = None
    debug: fields.Debug = False
    resume: Annotated[bool, Option("continue from the newest checkpoint in --out")] = False
    host_discovery_script: Annotated[
        Path | None, Option("a program that prints one host:slots per line, for elastic runs")
    ] = None
    log: fields.Log = None


def run(request: TrainRequest) -> TrainResult:
    """Train. Raises as `trained` does."""
    plan, target, names = _checked(request)
    resume = request.resume
    with paths.claimed(target, request.overwrite, resume, [plan.recipe.model.weights]) as folder:
        if plan.recipe.checkpoint and request.out is None:
            again = f"--out {shlex.quote(str(target))} --resume"
            say([f"no --out: checkpoints go to {target}; {again} continues from them"])
        say([*plan.warnings, *plan.unreached])
        with RunProgress([(1, plan.title, plan.np)]) as progress, Trackers(names, lambda line: say([line])) as trackers:
            result = trained(plan, folder, progress.watch(plan.title), resume, trackers)
    say(doubts(result))
    return result


def preview(request: TrainRequest) -> DryRun:
    """What would be started. Raises RequestError if it could not continue from the checkpoints in `out`."""
    from hvdkit.commands import dry_run  # its imports take a tenth of a run's time before ranks start

    plan, out, _ = _checked(request)
    paths.check_free(out, request.overwrite, request.resume, [plan.recipe.model.weights])
    described = dry_run.described("train", plan.recipe, out, [(plan, 1)], plan.unreached)
    only = described.runs[0]
    if tune.searches(plan):
        short, updates = tune.ROUNDS * len(tune.SETTINGS), tune.WARMUP_STEPS + tune.STEPS
        few = (only.steps or math.inf) < short * updates
        described.notes.append(
            f"tune: {short} short runs come first, to choose settings"
            + (f", of {updates} updates each: more than the run itself has" if few else "")
        )
    if not request.resume:
        return described
    if finished(plan, out):
        described.notes.append(f"{out}: this run has finished, so --resume would only show its result")
        return described
    from hvdkit.checkpoint.resume import pick  # NumPy comes with it

    newest, complaints = pick(out / "checkpoints", plan.recipe)
    only.first_step = newest.record.progress.step if newest else 0
    if only.seconds is not None and only.steps:
        only.seconds *= max(0, only.steps - only.first_step) / only.steps
    described.notes += [*complaints, f"{out}: continues from step {only.first_step}"]
    return described


def lines(request: TrainRequest, result: TrainResult) -> Iterator[str]:
    """Accuracy, speed and memory, and what can be done with the result."""
    here, folder = Path.cwd(), result.folder
    shown = request.out or (folder.relative_to(here) if folder.is_relative_to(here) else folder)
    yield result_lines(result)
    yield from kept_lines(result, shown)
    yield f"written to {folder}"
    if result.checkpoints and schema.load(folder / "config.yaml").data.name == "imagefolder":
        yield f"what is in a picture: {shlex.join(['hvdkit', 'predict-images', str(shown), 'PICTURE.jpg'])}"


def _checked(request: TrainRequest) -> tuple[CheckedRun, Path, list[str]]:
    """The run, its folder, and its trackers. Raises RequestError."""
    began = process_began() if request.typed else time.time()
    names, out, resume = tracking.check(request.log or []), request.out, request.resume
    recipe = loaded(request, out if resume else None, tracking.overrides(names), trains=True)
    if resume and (out is None or recipe.checkpoint is None):
        raise RequestError("--resume: expected --out with the run's folder, and a recipe without `checkpoint: null`")
    framework = request.framework or (writer(out) if resume and out else None)
    plan = replace(make_plan(recipe, framework, Placement.of(request), request.rival), began=began)
    return plan, out or paths.default_out(recipe.name, "train"), names


def trained(
    plan: CheckedRun, folder: Path, watch: Watch | None = None, resume: bool = False, trackers: Trackers | None = None
) -> TrainResult:
    """Run to the end, writing into `folder` (absolute, existing, empty); `watch` gets each line of metrics.jsonl.

    `trackers` get the lines too. Their run is begun here, and ended by whoever has opened them.
    With `resume` the folder may hold an earlier run of the recipe, which continues from its newest checkpoint; the
    result of a finished one is returned.
    Raises what the launcher raises: a rank's failure, a fault that only a rank could find, an interrupt; and Stopped
    where SIGTERM or SIGHUP ended training after a checkpoint.
    """
    trackers = trackers or Trackers([], print)
    trackers.begin(tracked(plan, folder))
    config, metrics, result = (folder / name for name in ("config.yaml", "metrics.jsonl", "result.json"))
    before = {path: content for path in (config, result) if (content := _content(path)) is not None}
    lines, kept, damaged = _checked_size(metrics), _checkpoints(folder), False
    earlier: Callable[[MetricLine], bool] = lambda line: False  # noqa: E731 - whether the run that is resumed wrote it
    if resume:
        done = finished(plan, folder)
        if done:
            _save_csv(folder)
            say([*damage(metrics), _nothing_to_do(folder, done, plan.recipe)])
            return done
        if result in before:
            try:
                TrainResult.read(result)
            except RequestError:
                say([f"{result}: damaged; it is made anew from the newest checkpoint"])
                damaged = True
        from hvdkit.checkpoint.resume import pick, recounts  # NumPy comes with it

        checkpoint, complaints = pick(folder / "checkpoints", plan.recipe)
        step = "the beginning: there is no checkpoint"
        if checkpoint:
            progress = checkpoint.record.progress
            step = f"step {progress.step}, epoch {min(progress.epoch + 1, plan.recipe.epochs)}/{plan.recipe.epochs}"
            size = plan.recipe.data_ranks(plan.np)
            recounted = recounts(checkpoint.record.recipe, checkpoint.record.np, plan.recipe, size)
            if plan.recipe.checkpoint and plan.recipe.checkpoint.accept_changed_data:
                recounted = True  # maybe: only ranks know how many samples there are now
            earlier = partial(is_before, progress=progress, recounted=recounted)
            if progress.epoch >= plan.recipe.epochs:  # else rank 0 says so with its first line
                complaints += damage(metrics)
        say([*complaints, f"{folder}: continues from {step}"])
    plan = tune.measured(plan, folder)
    recipe = schema.dump(plan.recipe)
    write_atomic(config, recipe)
    result.unlink(missing_ok=True)  # of a shorter run, or with other settings that may change

    def see(line: MetricLine) -> None:
        trackers.log(line)
        if watch and not earlier(line):
            watch(line)

    tail = MetricsTail(metrics, see)

    # Ranks of an elastic run replace the file themselves.
    lost = tail.lost if plan.recipe.elastic is None else str
    then = "training continues, and its metrics, later checkpoints and result are"
    removals = Removals(folder, lambda line: say([f"warning: {line}"]), then, recipe, lost)

    def look(last: bool = False) -> None:
        removals.look()
        tail.poll(last)

    arguments = ["--out", str(folder), *(["--resume"] if resume else [])]
    grace_s = PREEMPTION_GRACE_S if plan.recipe.checkpoint else 0.0
    stopped: Stopped | None = None
    try:
        try:
            launch(plan, config, arguments, folder / "logs", look, grace_s)
        except Stopped as signalled:
            stopped = signalled
        look(last=True)
    except BaseException as error:
        newest = _newest(folder)
        if newest and isinstance(error, RunError):
            error.add_note(f"the newest checkpoint is {newest}; continue with --resume")
        if (_checked_size(metrics) or 0) == (lines or 0) and _checkpoints(folder) == kept:
            for path, content in before.items():  # nothing was trained, so the earlier run's files still hold
                write_atomic(path, content)
        else:
            with suppress(RunError):  # the failure of the run matters more
                _save_csv(folder)
        raise
    _save_csv(folder)
    if not result.exists():
        newest = _newest(folder)
        if stopped and newest:
            raise Stopped(f"{stopped} after {newest}; continue with --resume")
        if stopped:
            raise Stopped(f"{stopped} before the first checkpoint")
        remedy = f"; the newest checkpoint is {newest}; continue with --resume" if newest else ""
        raise RunError(f"{folder}: all ranks have ended, and training is not done: there is no {result.name}{remedy}")
    ended = TrainResult.read(result)
    if (
        result in before and not damaged and not ended.measured_steps
    ):  # the earlier run had ended, so its figures are those that hold
        write_atomic(result, before[result])
        ended = TrainResult.read(result)
        say([_nothing_to_do(folder, ended, plan.recipe)])
    if not ended.measured_steps and not ended.images_per_second:
        _set_speed(ended, metrics)
        ended.written(folder)
    return ended


def _set_speed(result: TrainResult, metrics: Path) -> None:
    """Give a result that was made anew, without a step, the speed that the lines of its training have in the middle."""
    speeds = array("d", (line.images_per_second for line in read_metrics(metrics) if line.images_per_second))
    if speeds:
        result.images_per_second = statistics.median(speeds)
        result.samples_per_second = result.images_per_second / result.units_per_sample
        result.tokens_per_second = result.images_per_second if result.unit == "tokens" else None


def _content(path: Path) -> bytes | None:
    """What an earlier run has in a file; None if it is not there."""
    return read_bounded(path) if _checked_size(path) is not None else None


def _checked_size(path: Path) -> int | None:
    """The size of a file in bytes; None if it is not there. Raises RequestError for what is no file."""
    if not os.path.lexists(path):
        return None
    try:
        with open_regular(path) as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); remove it, and resume again") from None


def _nothing_to_do(folder: Path, done: TrainResult, recipe: Recipe) -> str:
    longer = f"steps={2 * done.steps}" if recipe.steps else f"epochs={2 * done.epochs}"
    if done.stopped_early:
        return (
            f"{folder}: {done.stopped_early}; nothing to do. To train longer: a larger early_stopping.patience, or "
            "early_stopping=null"
        )
    epochs = f"{done.epochs} epoch{'s' if done.epochs > 1 else ''}"
    return f"{folder}: already finished: {epochs}, {done.steps} steps; nothing to do. To train longer: {longer}"


def writer(folder: Path) -> str | None:
    """The framework that has written the newest checkpoint of the run in the folder; None if there is none."""
    from hvdkit.checkpoint.resume import last_record  # NumPy comes with it

    record = last_record(folder / "checkpoints")
    return record.framework if record and record.framework in FRAMEWORKS else None


def _checkpoints(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("step-*"))


def _newest(folder: Path) -> Path | None:
    """The newest checkpoint of the run in the folder."""
    return max(_checkpoints(folder), default=None)


def _save_csv(folder: Path) -> None:
    csv_files.save_metrics(folder / "metrics.csv", lambda: read_metrics(folder / "metrics.jsonl"))


def tracked(plan: CheckedRun, folder: Path, group: str | None = None) -> tracking.TrackedRun:
    """The run as trackers get it: the resolved recipe, and what the command line has chosen."""
    config: dict[str, Any] = plan.recipe.model_dump(mode="json") | {
        "framework": plan.framework,
        "np": plan.np,
        "rival": plan.rival,
        "launcher": plan.placement.launcher,
        "hvdkit_version": hvdkit.__version__,
    }
    return tracking.TrackedRun(folder, config, group)


def finished(plan: CheckedRun, folder: Path) -> TrainResult | None:
    """The result of an earlier run in the folder, if it is of this plan and has finished."""
    try:
        same = schema.load(folder / "config.yaml") == plan.recipe
        result = TrainResult.read(folder / "result.json") if same and (folder / "result.json").exists() else None
    except RequestError:
        return None
    if result is None or (result.framework, result.rival) != (plan.framework, plan.rival):
        return None
    return result if plan.recipe.elastic or result.np == plan.np else None  # elastic runs may have lost some
