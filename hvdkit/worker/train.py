"""One rank of `hvdkit train`: train a recipe, from the start or from a checkpoint."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import hvdkit
from hvdkit.adapters import capabilities
from hvdkit.core import metrics
from hvdkit.core.group import HOST, threads_per_rank
from hvdkit.core.loop import Handler, Loop
from hvdkit.core.seam import Adapter
from hvdkit.core.state import digest
from hvdkit.core.step_plan import Progress
from hvdkit.errors import Stopped
from hvdkit.files import open_standard_streams
from hvdkit.handlers.standard import attach
from hvdkit.heartbeat import DISK, NOTED, Heartbeat
from hvdkit.recipe.schema import Recipe
from hvdkit.results.train import TrainResult, kept_lines, result_lines, scores
from hvdkit.worker import measurement, startup, tuning
from hvdkit.worker.setup import RankScript, Setup, seed_rank, start

if TYPE_CHECKING:
    from hvdkit.checkpoint.elastic import Commits
    from hvdkit.handlers.metrics_file import MetricsFile
    from hvdkit.worker.one_writer import OneWriter

LAUNCHED = "HVDKIT_LAUNCHER"  # in the environment of ranks that hvdkit starts: it holds the lock of the run's folder


def train(
    adapter: Adapter, script: RankScript, recipe: Recipe, out: Path | None, heartbeat: Heartbeat, resume: bool = False
) -> TrainResult:
    """Train a recipe; rank 0 writes `metrics.jsonl`, `result.json`, checkpoints and TensorBoard events into `out`.

    With `resume`, training continues from the newest complete checkpoint in `out`, or starts from the beginning if
    there is none. Without `resume`, `out` must not have checkpoints. Without `out`, nothing is written. Under an
    elastic launcher, training continues when ranks are lost or join.

    Raises RequestError if the framework, device, model, data or checkpoint does not allow what the recipe asks for, or
    if another run is writing into `out`, RunError if a file cannot be written or ranks diverge, Stopped if a rank was
    asked to stop. Errors of Horovod and the framework are not caught.
    """
    if recipe.tensorboard:
        from hvdkit.handlers import tensorboard

        tensorboard.check_installed()
    writer = None
    if out and LAUNCHED not in os.environ:
        from hvdkit.worker.one_writer import OneWriter

        writer = OneWriter(out)
    attempt = partial(_train, adapter, script, recipe, out, heartbeat, writer)
    try:
        if recipe.elastic:
            from hvdkit.checkpoint import elastic

            if elastic.active():
                return elastic.run_until_done(adapter, attempt, heartbeat)
        return attempt(None, resume)
    finally:
        if writer:
            writer.release()


def _train(
    adapter: Adapter,
    script: RankScript,
    recipe: Recipe,
    out: Path | None,
    heartbeat: Heartbeat,
    writer: OneWriter | None,
    commits: Commits | None,
    resume: bool = True,
) -> TrainResult:
    setup = start(adapter, script, recipe, connected=commits.connected) if commits else start(adapter, script, recipe)
    if recipe.finds_batch_size:
        from hvdkit.worker import fitting  # most recipes have a number

        recipe = fitting.found(setup, heartbeat, out / "checkpoints" if out and resume else None)
        setup = replace(setup, recipe=recipe, task=script.task(recipe))
    mesh, dataset = setup.mesh, setup.dataset
    if writer:
        writer.check(adapter, mesh)
    heartbeat.beat("building the model")
    setup.check_trainable()
    if recipe.early_stopping:
        from hvdkit.handlers.stopping import check_early_stopping  # most runs do not need it

        check_early_stopping(recipe.early_stopping, setup.task, len(dataset.val))
    strategy = setup.strategy(recipe)
    session = setup.session(recipe, strategy, digests=True)
    if recipe.average_weights:
        session.keep_average(recipe.average_weights)
    initial = session.initial_sha256 or ""
    place = out / "checkpoints" if out else None
    keeps = place is not None and recipe.checkpoint is not None
    warnings: list[str] = []
    seen: list[np.ndarray] = []
    own: list[Handler] = []
    if setup.task.own:
        from hvdkit.worker.sanity_check import handlers_of, sanity_check

        own = handlers_of(setup)
        doubts = sanity_check(session, setup.task, dataset, recipe.batch_size, recipe.precision, seen)
        warnings = [*session.trainable.warnings, *doubts]
    if keeps or mesh.world.size > 1:
        from hvdkit.data import fingerprint

        dataset = replace(dataset, fingerprints=fingerprint.of_dataset(dataset))
        setup = replace(setup, dataset=dataset)
    if mesh.world.size > 1:
        from hvdkit.worker import alike

        warnings = alike.check(setup, session, initial, seen, bool(commits and commits.held), warnings)
    progress, recounted, rest = Progress(), False, dict[str, np.ndarray]()
    if commits or (resume and place):
        from hvdkit.checkpoint.resume import resumed

        held = commits.held if commits else None
        progress, recounted, rest, notes = resumed(recipe, mesh, dataset, session, place, held)
        strategy.load_state(rest)
        warnings += notes
    else:
        if place and keeps:
            from hvdkit.checkpoint.resume import check_fresh

            check_fresh(adapter, mesh, place)
        if mesh.tensor.size > 1:  # what each of its ranks has whole
            session.broadcast_state(mesh.tensor)
        if mesh.world.size > 1:  # packing the state takes memory
            session.broadcast_state(mesh.data)
            startup.return_freed_memory()
    first_step = progress.step
    stream = mesh.stream
    if first_step or stream or mesh.model.size > 1:  # rank 0 of whole models draws on from its start
        seed_rank(adapter, recipe, stream, first_step)

    checkpoints = None
    if mesh.is_root and place and recipe.checkpoint:
        from hvdkit.checkpoint.writing import Checkpoints

        checkpoints = Checkpoints(place, recipe.checkpoint, setup.task.best, heartbeat)
    keeper = None
    if place or commits:
        from hvdkit.worker.keeper import Keeper

        keeper = Keeper(setup, session, checkpoints, commits)

    def report(phase: str, step: int) -> None:
        heartbeat.beat(phase, step)
        if commits and step > first_step:
            commits.stepped(step, mesh.world.size)

    beat = partial(heartbeat.beat, "reading metrics.jsonl")
    metrics_file = _metrics_file(out, recipe, progress, recounted, beat) if out and mesh.is_root else None
    communication = None
    if mesh.world.size > 1:
        from hvdkit.handlers.communication import watched

        communication = watched(adapter, mesh)
    loop = Loop(session, setup.task, recipe, mesh, dataset, report, progress)
    attach(
        loop,
        metrics_file,
        keep=keeper.keep if keeper else lambda progress, _: seed_rank(adapter, recipe, stream, progress.step),
        commit=keeper.commit if keeper and commits else None,
        asked_to_stop=heartbeat.asked_to_stop if keeps else None,
        of_task=own,
        resumed={} if recounted else rest,
        communication=communication,
    )
    open_standard_streams()  # the user's model may have closed them
    loop.warn(warnings)
    if NOTED not in os.environ:
        from hvdkit.worker.unreached import unreached  # `hvdkit train` has said it

        loop.notes += unreached(loop.plan)
    loop.notes += metrics_file.notes if metrics_file else []
    if mesh.is_root:
        print("".join(f"warning: {note}\n" for note in loop.notes), end="", flush=True)
    since_warmup = measurement.SinceWarmup(loop)
    loop.handlers.insert(0, since_warmup)
    started = time.perf_counter()
    try:
        loop.train()
        if keeper and keeps:
            keeper.end(loop.progress, heartbeat)
    except Stopped:
        if keeper:
            keeper.end(loop.progress, heartbeat)
        adapter.shutdown()
        raise
    finally:
        if checkpoints:
            checkpoints.wait()
    train_s = time.perf_counter() - started

    heartbeat.beat("gathering the result")
    result = _result(setup, loop, since_warmup.used(), initial, train_s, first_step)
    if communication:
        result = result.model_copy(update=communication.figures())
    if commits:
        commits.stepped(result.steps, mesh.world.size)  # ranks lost after the last update count too
        result.recoveries = commits.recoveries
    if metrics_file:
        metrics_file.keep()
    if out and not mesh.is_root:
        heartbeat.beat(DISK)
    if mesh.is_root:
        if out and checkpoints:
            result.checkpoints = {name: str(path.relative_to(out)) for name, path in checkpoints.kept().items()}
        lines = [result_lines(result)]
        if out:
            heartbeat.on_disk("result.json", result.written, out)
            lines += [*kept_lines(result, out), f"all figures: {out / 'result.json'}"]
        else:
            lines[-1] += "; --out FOLDER keeps all figures and the weights"
        print("\n".join(lines), flush=True)
    if out:
        metrics.reduce_sums(adapter, mesh.world, written=1.0)
    heartbeat.beat("leaving Horovod")
    adapter.shutdown()
    return result


def _metrics_file(
    out: Path, recipe: Recipe, progress: Progress, recounted: bool, beat: Callable[[], None]
) -> MetricsFile:
    """metrics.jsonl and TensorBoard's events, cut to `progress`."""
    from hvdkit.handlers.metrics_file import MetricsFile

    event_file = None
    if recipe.tensorboard:
        from hvdkit.handlers import tensorboard

        event_file = tensorboard.EventFile(out / tensorboard.FOLDER)
    metrics_file = MetricsFile(out / "metrics.jsonl", event_file)
    metrics_file.forget_after(progress, recounted, beat)
    return metrics_file


def _result(
    setup: Setup, loop: Loop, used: dict[str, float], initial_state_sha256: str, train_s: float, first_step: int
) -> TrainResult:
    """The result of the run; collective, with the same figures on all ranks, but for digests, which rank 0 has."""
    adapter, recipe, mesh, task, dataset = setup.adapter, setup.recipe, setup.mesh, setup.task, setup.dataset
    session, progress, topology, versions = loop.session, loop.progress, mesh.topology, adapter.versions()
    units = [samples * task.units for samples in loop.step_samples]
    measured = measurement.gather(adapter, recipe, mesh, loop.clock, used, units)
    speed = measured.samples_per_second
    weights = ((name, array) for name, array in session.model_arrays(keep=mesh.is_root) if name in session.shapes)
    final = digest(weights)
    everyone = adapter.allgather_object((HOST, list(dataset.corrupt)), mesh.world, name="corrupt")
    hosts = [name for name, _ in everyone]
    sizes, chosen, divided = None, None, dict[str, Any]()
    if adapter.rival is None or session.update.partition.groups:  # hvdkit itself, and rivals that shard
        every = adapter.allgather_object(session.state_bytes(), mesh.world, name="state_bytes")
        sizes = max(every, key=lambda of_rank: sum(of_rank.values()))
        if recipe.parallel.divides:
            from hvdkit.worker import stages  # most models are whole

            divided = stages.figures(setup, loop, every, hosts)
    if adapter.rival is None:
        own = capabilities.chosen(adapter.CHOSEN[topology.device], recipe)
        chosen = tuning.listed(tuning.apply(recipe), own, recipe.model.TASK)
    same = {"seed", "batch_size", "allreduce", "sharding", "precision", "accumulate", "recompute"}
    return TrainResult(
        **recipe.model_dump(include=same),
        **measured.figures,
        **scores(progress.validation, progress.average_validation),
        **divided,
        framework=adapter.NAME,
        rival=adapter.rival,
        framework_version=versions["framework"],
        horovod_version=versions.get("horovod"),
        hvdkit_version=hvdkit.__version__,
        recipe=recipe.name,
        model=recipe.model.name,
        parameters=sum(math.prod(shape) for shape in session.shapes.values()),
        np=measured.processes,
        launcher=os.environ.get(LAUNCHED) or ("horovodrun" if "HOROVOD_RANK" in os.environ else "none"),
        hosts=hosts,
        device=topology.device,
        shared_memory_ranks=topology.shared_memory_ranks if "horovod" in versions else None,
        threads=threads_per_rank(None if recipe.threads == "auto" else recipe.threads, topology.local_size),
        compression=str(recipe.compression),
        sync=recipe.sync and recipe.sync.model_dump(),
        bytes_per_step=session.bytes_per_step,
        state_bytes=sizes,
        optimizer=recipe.optimizer.name,
        epochs=progress.epoch + bool(progress.samples) if loop.stopped_early else loop.epochs,
        stopped_early=loop.stopped_early,
        steps=progress.step,
        first_step=first_step,
        images_per_second=speed,
        cpu_s_per_image=measured.cpu_s_per_sample,
        train_loss=progress.train_loss,
        val_samples=len(dataset.val) if progress.validation and not dataset.native else None,
        train_s=train_s,
        corrupt_images=len({path for _, paths in everyone for path in paths}),
        native_pipeline=dataset.native,
        tuning=chosen,
        unit=task.unit,
        units_per_sample=task.units,
        task=recipe.model.TASK,
        samples_per_second=speed / task.units,
        tokens_per_second=speed if task.unit == "tokens" else None,
        text_sha256=dataset.text_sha256,
        model_flop_per_second=task.flop and task.flop * speed,
        ended_at=datetime.now(UTC).replace(microsecond=0),
        initial_state_sha256=initial_state_sha256,
        final_weights_sha256=final,
    )
