"""The start of a rank in every mode: Horovod, the data set, the model, and the sessions that train it."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdkit import tasks, usage
from hvdkit.adapters.capabilities import LARGE_MODEL, OWN_PAGES_FROM, check_can
from hvdkit.core.group import Group, Mesh, Ranks, sets, threads_per_rank
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Session
from hvdkit.core.strategy import GRADIENTS, Strategy
from hvdkit.data.dataset import BatchedSplit, Dataset, StreamedSplit
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Recipe, flat
from hvdkit.strategies import choose
from hvdkit.tasks.task import Architecture, Task, parameter_count, state_shapes
from hvdkit.worker import startup, tuning

if TYPE_CHECKING:
    from hvdkit.baselines.base import Baseline

# One of them is there where a launcher has started this rank.
_RANKED = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID")
_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")  # how many ranks it has started


@dataclass(frozen=True)
class RankScript:
    """What a rank's script provides: the framework's model from a table (`tasks.task.Architecture`), and the task."""

    build: Callable[[Any], Any]
    task: Callable[[Recipe], Task] = tasks.choose


@dataclass(frozen=True)
class Setup:
    """A rank that has started: its place among the others, its data, and the model that it will build."""

    adapter: Adapter
    script: RankScript
    recipe: Recipe
    mesh: Mesh
    dataset: Dataset
    task: Task
    architecture: Architecture

    def check_trainable(self) -> None:
        """Raise RequestError if the recipe's model cannot be trained on its batches."""
        self.task.check(self.dataset.shape)

    def strategy(self, recipe: Recipe, name: str = GRADIENTS) -> Strategy:
        """The recipe's strategy, or the rival's if the adapter is one. `name` as in `strategies.choose`."""
        baseline = _baseline(self.adapter)
        return baseline.strategy(self.mesh, recipe) if baseline else choose(self.adapter, self.mesh, recipe, name)

    def session(self, recipe: Recipe, strategy: Strategy | None = None, digests: bool = False) -> Session:
        """A session of the model, with the recipe's optimizer. The initial weights come from the seed or a file.

        Without a strategy, gradients are not averaged over ranks. `digests` as in `Session`. Raises RequestError like
        `Session`, and if `build` returns a model whose tensors differ from the table's.
        """
        precision = PRECISIONS[recipe.precision]
        architecture = replace(
            self.architecture, dtype=precision.parameters, compute_dtype=precision.compute, recompute=recipe.recompute
        )
        whole, tables, plan, pieces = architecture, [architecture], None, None
        if self.mesh.model.size > 1:
            from hvdkit.worker import divided  # most models are whole

            tables, plan, pieces = divided.share_of(whole, self.mesh, recipe)
        baseline = _baseline(self.adapter)
        make = baseline.session_class if baseline else Session
        loss = self.task.loss or recipe.loss

        def initial() -> Mapping[str, Any]:
            if not recipe.model.weights:
                return {name: own for table in tables for name, own in table.initial_state(recipe.seed).items()}
            state = whole.initial_state(recipe.seed)
            from hvdkit.checkpoint import weights

            shapes = {name: value.shape for name, value in state.items()}
            loaded = weights.read_fitting(Path(recipe.model.weights), shapes, recipe.model.new_head, whole)
            if loaded.notes and self.mesh.is_root:
                print("\n".join(loaded.notes), flush=True)
            state = loaded.onto(state)
            return {name: state[name] for table in tables for name in state_shapes(table)} if plan else state

        with startup.own_pages(self._own_pages_from(recipe)):
            models = [self.script.build(table) for table in tables]
            if plan and self.task.own:
                models = divided.own_chunks(self.adapter, self.task, models[0], self.dataset, self.mesh, recipe)
            self._synchronize_batch_norms(models, recipe)
            model = models if len(models) > 1 else models[0]
            settings = recipe.optimizer, loss, strategy, recipe.precision, initial, self._targets(recipe)
            session = make(self.adapter, model, *settings, digests, pieces, plan)
        startup.done()
        return session

    def _targets(self, recipe: Recipe) -> int:
        """About how many targets a batch has, the same on all ranks."""
        if not self.task.own or isinstance(self.dataset.train, BatchedSplit | StreamedSplit):
            return recipe.batch_size * self.task.units
        return recipe.batch_size * int(np.asarray(self.dataset.train.batch(np.arange(1)).targets).size)

    def _synchronize_batch_norms(self, models: Sequence[Any], recipe: Recipe) -> None:
        every = recipe.model.batch_norm == "synchronized"
        if not (every or self.task.own):
            return
        data = self.mesh.data
        names = [name for model in models for name in self.adapter.synchronize_batch_norms(model, data, every)]
        if self.mesh.pipeline.size > 1:
            every_stage = self.adapter.allgather_object(names, self.mesh.pipeline, "batch_norms")
            names = [name for stage in every_stage for name in stage]
        if every and not names and data.size > 1:
            raise RequestError("model.batch_norm: expected local for a model without batch norms, got synchronized")
        if names and data.size > 1 and (rival := self.adapter.rival):
            from hvdkit.baselines import registry

            registry.check_synchronized(rival, names)
        if names and not every and self.mesh.is_root:
            print(f"batch norm: {len(names)} layer(s) of the model are synchronized over all ranks", flush=True)

    def _own_pages_from(self, recipe: Recipe) -> int | None:
        """Bytes of a block from which it is returned to the kernel when a step frees it; None if none is."""
        if recipe.sharding == "none" or self.mesh.data.size == 1 or self.adapter.NAME not in OWN_PAGES_FROM:
            return None
        return OWN_PAGES_FROM[self.adapter.NAME][parameter_count(self.architecture) >= LARGE_MODEL]


def _baseline(adapter: Adapter) -> Baseline | None:
    if adapter.rival is None:
        return None
    from hvdkit.baselines.base import Baseline

    assert isinstance(adapter, Baseline)
    return adapter


def start(
    adapter: Adapter,
    script: RankScript,
    recipe: Recipe,
    dataset: Dataset | None = None,
    connected: Callable[[], None] = lambda: None,
) -> Setup:
    """Start Horovod, check that the recipe can run here, open its data set, or take `dataset`, and describe its model.

    `connected` is called once Horovod is initialized.

    Raises RequestError if the recipe cannot run here, ranks have different recipes, or the data set cannot be opened.
    """
    if adapter.rival is None:
        tuning.apply(recipe)
    threads = None if recipe.threads == "auto" else recipe.threads
    if not any(name in os.environ for name in _RANKED):  # else Gloo resolves the host's name, which may be unknown
        os.environ.setdefault("HOROVOD_GLOO_IFACE", "lo")
    sockets: AbstractContextManager[None] = nullcontext()
    axes, groups = recipe.parallel, list[Ranks]()
    if recipe.elastic:
        from hvdkit.elastic_line import recording_peer_sockets

        sockets = recording_peer_sockets()
    with sockets:
        if axes.divides:  # Horovod takes process sets only before it says how many ranks there are
            from hvdkit.recipe import parallel

            np = int(next((os.environ[name] for name in _SIZES if name in os.environ), 1))
            parallel.check_ranks(axes, np)
            groups = sets(np, axes.pipeline, axes.tensor)
        topology = adapter.init(recipe.device, threads, groups)
    connected()
    mesh = Mesh(topology, axes.pipeline, axes.tensor, adapter.process_set)
    per_rank = threads_per_rank(threads, topology.local_size)
    usage.pin_where_asked(topology.local_rank, topology.local_size, per_rank)
    seed_alike(adapter, recipe)  # until training begins, all ranks draw the same: samples, initial weights
    check_can(adapter, recipe if adapter.rival is None else recipe.model_copy(update={"sharding": "none"}), topology)
    check_alike(adapter, mesh.world, flat(recipe))
    task = script.task(recipe)
    dataset = task.open_data(mesh.shard) if dataset is None else dataset
    if getattr(recipe.data, "shares", False):
        from hvdkit.data import shares

        dataset = shares.join(dataset, mesh.shard, partial(adapter.allgather_object, group=mesh.data, name="shares"))
    for line in (dataset.note, *dataset.left_out):
        if line and topology.rank == 0:
            print(line, flush=True)
    architecture = task.architecture(dataset.shape)
    if axes.divides:
        architecture.check_parallel(axes)
    return Setup(adapter, script, recipe, mesh, dataset, task, architecture)


def seed_of(recipe: Recipe, stream: int, step: int = 0) -> int:
    """The seed of a rank's random numbers from a step on: for rank 0 at the start the recipe's, for all others another.

    `stream` is `Mesh.stream`. So the masks of dropout differ between ranks that read other samples or have other
    layers, and are the same in each run of a recipe on such a mesh. Until the first step all ranks have rank 0's.
    """
    return (recipe.seed + 1_000_003 * step + 2_654_435_761 * stream) % 2**32


def seed_alike(adapter: Adapter, recipe: Recipe) -> None:
    """Seed all generators as before the first step, the same on all ranks."""
    startup.seed_alike(recipe.seed)
    adapter.seed(seed_of(recipe, 0))


def seed_rank(adapter: Adapter, recipe: Recipe, stream: int, step: int) -> None:
    """Seed all generators for a rank's steps from `step` on, by `seed_of`."""
    value = seed_of(recipe, stream, step)
    random.seed(value)
    np.random.seed(value)
    adapter.seed(value)


def check_alike(adapter: Adapter, world: Group, settings: Mapping[str, Any]) -> None:
    """Check that all ranks have the same settings (values by dotted key); collective.

    Raises RequestError, the same on every rank, naming each key that differs and the ranks' values.
    """
    if world.size == 1:
        return
    everyone = adapter.allgather_object(dict(settings), world, name="settings")
    faults = []
    for key in sorted({key for of_rank in everyone for key in of_rank}):
        values = [of_rank.get(key, "nothing") for of_rank in everyone]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            faults.append(
                f"{key}: expected the same on all ranks, got {values[0]} on rank 0 and {values[other]} on rank {other}"
            )
    if faults:
        raise RequestError("\n".join(faults))
