"""One rank's work: train a recipe, from a checkpoint on if asked; evaluate a checkpoint; take part in a proof."""

from __future__ import annotations

import copy
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import hvdkit
from hvdkit.checkpoint import elastic, snapshots, weights
from hvdkit.checkpoint.elastic import Commits
from hvdkit.checkpoint.resume import check_fresh, flat, resumed
from hvdkit.checkpoint.snapshots import Checkpoint
from hvdkit.core import measurement, metrics, tensorboard, tuning, usage
from hvdkit.core import trainer as loop_
from hvdkit.core.agreement import check_alike
from hvdkit.core.counters import Progress
from hvdkit.core.heartbeat import Heartbeat
from hvdkit.core.precision import PRECISIONS, check_can
from hvdkit.core.seam import Adapter, rival_of
from hvdkit.core.session import Session
from hvdkit.core.state import digest, network_of, parameters_of
from hvdkit.core.strategy import Strategy
from hvdkit.core.topology import Topology, threads_per_rank
from hvdkit.core.trainer import Loop
from hvdkit.data.batches import Dataset, open_dataset
from hvdkit.errors import RequestError, RunError, Stopped
from hvdkit.files import write_atomic
from hvdkit.recipe.communication import Uncompressed
from hvdkit.recipe.schema import Recipe
from hvdkit.results.evaluate import EvaluationResult
from hvdkit.results.train import TrainResult, kept_lines
from hvdkit.strategies import choose
from hvdkit.strategies.dense import Dense, restart_names
from hvdkit.tasks import resnet
from hvdkit.worker import parity, startup

Build = Callable[[resnet.ResNet], Any]


def train(
    adapter: Adapter, build: Build, recipe: Recipe, out: Path | None, heartbeat: Heartbeat, resume: bool = False
) -> TrainResult:
    """Train as the recipe says; rank 0 writes `metrics.jsonl`, `result.json`, checkpoints and events into `out`.

    With `resume` it goes on from the newest whole checkpoint in `out`, or starts where there is none; without, `out`
    may hold none. Without `out` nothing is written. Under an elastic
    launcher it goes on whenever ranks are lost or join.
    Raises RequestError where framework, device, network, data or checkpoint do not allow what the recipe asks, RunError
    where a file cannot be written or ranks come to differ, Stopped where a rank was asked to stop; what Horovod and the
    framework raise passes.
    """
    if recipe.tensorboard:
        tensorboard.check_installed()
    attempt = partial(_train, adapter, build, recipe, out, heartbeat)
    if recipe.elastic and elastic.active():
        return elastic.persist(adapter, attempt, heartbeat)
    return attempt(None, resume)


def _train(
    adapter: Adapter,
    build: Build,
    recipe: Recipe,
    out: Path | None,
    heartbeat: Heartbeat,
    commits: Commits | None,
    resume: bool = True,
) -> TrainResult:
    topology, dataset, network = start(adapter, recipe)
    heartbeat.beat("building the network")
    check_trainable(network, dataset, recipe)
    strategy = strategy_of(adapter, topology, recipe)
    session = open_session(adapter, build, network, recipe, strategy)
    initial = network_of(session.state())
    place = out / "checkpoints" if out else None
    keeps = place is not None and recipe.checkpoint is not None
    progress, recounted, root = Progress(), False, 0
    if commits or (resume and place):
        held = commits.held if commits else None
        progress, recounted, root, rest = resumed(adapter, recipe, topology, dataset, session, place, held)
        strategy.load_state(rest)
        if progress.step:
            adapter.seed(_seed_at(recipe, progress))
    elif place and keeps:
        check_fresh(adapter, topology, place)
    session.broadcast_state(root_rank=root)
    first_step = progress.step

    checkpoints = None
    if topology.is_root and place and recipe.checkpoint:
        checkpoints = snapshots.Checkpoints(place, recipe.checkpoint)
    keeper = _Keeper(adapter, session, recipe, topology, strategy, checkpoints, commits)

    def tell(phase: str, step: int) -> None:
        heartbeat.beat(phase, step)
        if commits and step > first_step:
            commits.stepped(step, topology.size)

    loop = Loop(
        adapter,
        session,
        recipe,
        topology,
        dataset,
        _metrics_file(out if topology.is_root else None, recipe, progress, recounted),
        tell=tell,
        progress=progress,
        keep=keeper.keep,
        commit=keeper.commit if commits else None,
        asked_to_stop=heartbeat.asked_to_stop if keeps else None,
    )
    started = time.perf_counter()
    try:
        session.fit(loop)
    except Stopped:
        adapter.shutdown()
        raise
    finally:
        if checkpoints:
            checkpoints.wait()
    train_s = time.perf_counter() - started

    heartbeat.beat("gathering the result")
    result = _result(adapter, recipe, topology, dataset, loop, network, session, digest(initial), train_s, first_step)
    result.bytes_per_step = strategy.bytes_per_step
    if commits:
        commits.stepped(result.steps, topology.size)  # a loss behind the last update is one too
        result.recoveries = commits.recoveries
    if topology.is_root:
        if out and checkpoints:
            result.checkpoints = {name: str(path.relative_to(out)) for name, path in checkpoints.kept().items()}
        print(result.model_dump_json(indent=2), flush=True)
        if out:
            write_atomic(out / "result.json", result.model_dump_json(indent=2) + "\n")
            for line in kept_lines(result, out):
                print(line, flush=True)
    heartbeat.beat("leaving Horovod")
    adapter.shutdown()
    return result


@dataclass(frozen=True)
class _Keeper:
    """Keeps a run's state: on the disk, by the rank that has `checkpoints`, and in memory where there are `commits`."""

    adapter: Adapter
    session: Session
    recipe: Recipe
    topology: Topology
    strategy: Strategy
    checkpoints: snapshots.Checkpoints | None
    commits: Commits | None

    def keep(self, progress: Progress) -> None:
        """Begin to write a checkpoint; collective."""
        if self.checkpoints or not isinstance(self.strategy, Dense):  # others ask all ranks for their part
            taken = self._snapshot(progress)
            if self.checkpoints:
                self.checkpoints.write(taken)
        # Whoever goes on from here draws the same random numbers, killed in between or not.
        self.adapter.seed(_seed_at(self.recipe, progress))

    def commit(self, progress: Progress) -> None:
        """Keep the state in memory; collective. Raises HostsChanged where ranks come or go."""
        if self.commits:
            self.commits.take(self._snapshot(progress))

    def _snapshot(self, progress: Progress) -> Checkpoint:
        rest = self.strategy.state()
        record = _record(self.adapter, self.recipe, self.topology, progress)
        return Checkpoint(record, self.session.state() | rest)


def _metrics_file(out: Path | None, recipe: Recipe, progress: Progress, recounted: bool) -> metrics.MetricsFile:
    """metrics.jsonl and TensorBoard's events up to `progress`; nothing is written without `out`, as on other ranks."""
    event_file = tensorboard.EventFile(out / tensorboard.FOLDER) if out and recipe.tensorboard else None
    metrics_file = metrics.MetricsFile(out / "metrics.jsonl" if out else None, event_file)
    metrics_file.forget_after(progress, recounted)
    return metrics_file


def evaluate(
    adapter: Adapter, build: Build, recipe: Recipe, folder: Path, out: Path | None, heartbeat: Heartbeat
) -> None:
    """Evaluate the checkpoint in `folder` over the recipe's validation split; rank 0 writes `evaluate.json` into `out`.

    Raises RequestError where the checkpoint cannot be read or does not fit the recipe, or there is nothing to evaluate;
    RunError where its loss is no number.
    """
    topology, dataset, network = start(adapter, recipe)
    if len(dataset.val) == 0:
        raise RequestError("data: expected validation images, got none")
    session = open_session(adapter, build, network, recipe)
    found = snapshots.read(folder)
    session.load_state(network_of(found.state))
    on_batch = partial(heartbeat.beat, "evaluation")
    correct, total, loss = loop_.count(adapter, session, dataset.val, recipe.batch_size, topology, on_batch)
    if not math.isfinite(loss):  # JSON has no such number
        raise RunError(f"{folder}: its loss is no number: training has run away before; use an earlier checkpoint")
    versions = adapter.versions()
    result = EvaluationResult(
        framework=adapter.NAME,
        framework_version=versions["framework"],
        hvdkit_version=hvdkit.__version__,
        recipe=recipe.name,
        model=recipe.model.name,
        np=topology.size,
        trained_by=found.record.framework,
        step=found.record.progress.step,
        correct=correct,
        total=total,
        accuracy=correct / total,
        loss=loss / total,
    )
    if topology.is_root and out:
        write_atomic(out / "evaluate.json", result.model_dump_json(indent=2) + "\n")
    adapter.shutdown()


def _record(adapter: Adapter, recipe: Recipe, topology: Topology, progress: Progress) -> snapshots.Record:
    return snapshots.Record(
        progress=copy.copy(progress),
        np=topology.size,
        framework=adapter.NAME,
        framework_version=adapter.versions()["framework"],
        hvdkit_version=hvdkit.__version__,
        recipe=recipe.model_dump(mode="json"),
    )


def _seed_at(recipe: Recipe, progress: Progress) -> int:
    return (recipe.seed + 1_000_003 * progress.step) % 2**32


def compare(adapter: Adapter, build: Build, recipe: Recipe, part: parity.Part, heartbeat: Heartbeat) -> None:
    """Take part in `hvdkit parity` as `part` says, in float64. Raises as `train` does."""
    recipe = recipe.model_copy(update={"precision": "fp64"})
    topology, dataset, network = start(adapter, recipe)
    check_trainable(network, dataset, recipe)
    opener = partial(open_session_for_parity, adapter, build, network, topology)
    parity.Participant(adapter, opener, recipe, topology, dataset, part, heartbeat).take_part()
    heartbeat.beat("leaving Horovod")
    adapter.shutdown()


def start(adapter: Adapter, recipe: Recipe) -> tuple[Topology, Dataset, resnet.ResNet]:
    """Start Horovod, check that the recipe can be done, open its data and draw up its network.

    Raises RequestError where something of that cannot be.
    """
    if rival_of(adapter) is None:
        tuning.apply(recipe)
    threads = None if recipe.threads == "auto" else recipe.threads
    restart_names()
    with elastic.noting_lines():
        topology = adapter.init(recipe.device, threads)
    each = threads_per_rank(threads, topology.local_size)
    usage.pin_where_asked(topology.local_rank, topology.local_size, each)
    adapter.seed(recipe.seed)
    check_can(adapter, recipe, topology)
    check_alike(adapter, topology, flat(recipe))
    dataset = open_dataset(recipe.data, recipe.model.classes, recipe.seed, topology, recipe.batch_size)
    return topology, dataset, resnet.architecture(recipe.model.name, recipe.model.classes, dataset.shape[2])


def check_trainable(network: resnet.ResNet, dataset: Dataset, recipe: Recipe) -> None:
    """Check that no batch norm gets one value a channel, which has no variance. Raises RequestError."""
    height, width, _ = dataset.shape
    if recipe.batch_size == 1 and resnet.last_map(network, height, width) == (1, 1):
        raise RequestError(
            f"batch_size: {network.name} makes one value a channel of {height}×{width} pixels, of which batch norm "
            "knows no variance; expected 2 or more images a rank and step, or larger ones"
        )


def strategy_of(adapter: Adapter, topology: Topology, recipe: Recipe) -> Strategy:
    """The recipe's strategy, or a baseline's own."""
    baseline = getattr(adapter, "strategy", None)
    return baseline(topology, recipe) if baseline else choose(adapter, topology, recipe)


def open_session(
    adapter: Adapter, build: Build, network: resnet.ResNet, recipe: Recipe, strategy: Strategy | None = None
) -> Session:
    """The recipe's network bound to its optimizer, with the initial weights that its seed draws or a file holds.

    Without a strategy each rank is alone. Raises RequestError as `Session` does, and where `build` makes other tensors
    than the table has.
    """
    precision = PRECISIONS[recipe.precision]
    network = replace(
        network,
        dtype=precision.parameters,
        compute_dtype=precision.compute,
        recompute=recipe.recompute,
        zero_init_residual=recipe.model.zero_init_residual,
    )
    make = getattr(adapter, "session_class", Session)
    session: Session = make(adapter, build(network), recipe.optimizer, recipe.loss, strategy, recipe.precision)
    state = resnet.initial_state(network, recipe.seed)
    if recipe.model.weights:
        state = weights.start_from(Path(recipe.model.weights), state, recipe.model.new_head)
    session.load_state(state)
    startup.done()
    return session


def open_session_for_parity(
    adapter: Adapter, build: Build, network: resnet.ResNet, topology: Topology, recipe: Recipe
) -> Session:
    """As `open_session`; gradients are averaged uncompressed, at each update, by Horovod's own reduction."""
    dense = recipe.model_copy(update={"compression": Uncompressed(), "sync": None, "allreduce": "ring"})
    return open_session(adapter, build, network, dense, strategy_of(adapter, topology, dense))


def _result(
    adapter: Adapter,
    recipe: Recipe,
    topology: Topology,
    dataset: Dataset,
    loop: Loop,
    network: resnet.ResNet,
    session: Session,
    initial_state_sha256: str,
    train_s: float,
    first_step: int,
) -> TrainResult:
    """Collective: all ranks call it, all get the same figures."""
    measured, progress = measurement.gather(adapter, recipe, topology, loop), loop.progress
    versions = adapter.versions()
    corrupt = {path for each in adapter.allgather_object(list(dataset.corrupt), name="corrupt") for path in each}
    return TrainResult(
        framework=adapter.NAME,
        rival=rival_of(adapter),
        framework_version=versions["framework"],
        horovod_version=versions.get("horovod"),
        hvdkit_version=hvdkit.__version__,
        recipe=recipe.name,
        model=recipe.model.name,
        parameters=resnet.parameter_count(network),
        np=measured.processes,
        launcher=os.environ.get("HVDKIT_LAUNCHER") or ("horovodrun" if "HOROVOD_RANK" in os.environ else "none"),
        device=topology.device,
        threads=threads_per_rank(None if recipe.threads == "auto" else recipe.threads, topology.local_size),
        seed=recipe.seed,
        batch_size=recipe.batch_size,
        compression=str(recipe.compression),
        sync=recipe.sync and recipe.sync.model_dump(),
        allreduce=recipe.allreduce,
        optimizer=recipe.optimizer.name,
        precision=recipe.precision,
        accumulate=recipe.accumulate,
        recompute=recipe.recompute,
        epochs=loop.epochs,
        steps=progress.step,
        first_step=first_step,
        **measured.figures,
        train_loss=progress.train_loss,
        val_accuracy=progress.val_accuracy,
        val_loss=progress.val_loss,
        train_s=train_s,
        corrupt_images=len(corrupt),
        native_pipeline=dataset.native,
        tuning=None if rival_of(adapter) else tuning.told(tuning.apply(recipe), adapter.CHOSEN[topology.device]),
        ended_at=datetime.now(UTC).replace(microsecond=0),
        initial_state_sha256=initial_state_sha256,
        final_weights_sha256=digest(parameters_of(session.state())),
    )
