"""The start of a rank in every mode: Horovod, the data set, the network, and the session that trains it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdkit.core import tuning, usage
from hvdkit.core.agreement import check_alike
from hvdkit.core.precision import PRECISIONS, check_can
from hvdkit.core.seam import Adapter, rival_of
from hvdkit.core.session import Session
from hvdkit.core.strategy import Strategy
from hvdkit.core.topology import Topology, threads_per_rank
from hvdkit.data.batches import Dataset, open_dataset
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Recipe, flat
from hvdkit.strategies import choose
from hvdkit.strategies.dense import restart_names
from hvdkit.tasks import resnet
from hvdkit.worker import startup

Build = Callable[[resnet.ResNet], Any]


def start(adapter: Adapter, recipe: Recipe) -> tuple[Topology, Dataset, resnet.ResNet]:
    """Start Horovod, check that the recipe can run here, open its data set and describe its network.

    Raises RequestError if the recipe cannot run here, ranks have different recipes, or the data set cannot be opened.
    """
    if rival_of(adapter) is None:
        tuning.apply(recipe)
    threads = None if recipe.threads == "auto" else recipe.threads
    restart_names()
    with _noting_lines_if_elastic(recipe):
        topology = adapter.init(recipe.device, threads)
    each = threads_per_rank(threads, topology.local_size)
    usage.pin_where_asked(topology.local_rank, topology.local_size, each)
    adapter.seed(recipe.seed)
    check_can(adapter, recipe, topology)
    check_alike(adapter, topology, flat(recipe))
    dataset = open_dataset(recipe.data, recipe.model.classes, recipe.seed, topology, recipe.batch_size)
    return topology, dataset, resnet.architecture(recipe.model.name, recipe.model.classes, dataset.shape[2])


def _noting_lines_if_elastic(recipe: Recipe) -> AbstractContextManager[None]:
    if recipe.elastic is None:
        return nullcontext()
    from hvdkit.checkpoint import elastic

    return elastic.noting_lines()


def check_trainable(network: resnet.ResNet, dataset: Dataset, recipe: Recipe) -> None:
    """Check that every batch norm has more than one value per channel, as one has no variance. Raises RequestError."""
    height, width, _ = dataset.shape
    if recipe.batch_size == 1 and resnet.last_map(network, height, width) == (1, 1):
        raise RequestError(
            f"batch_size: {network.name} makes one value a channel of {height}×{width} pixels, of which batch norm "
            "knows no variance; expected 2 or more images a rank and step, or larger ones"
        )


def strategy_of(adapter: Adapter, topology: Topology, recipe: Recipe) -> Strategy:
    """The recipe's strategy, or the baseline's if the adapter is one."""
    baseline = getattr(adapter, "strategy", None)
    return baseline(topology, recipe) if baseline else choose(adapter, topology, recipe)


def open_session(
    adapter: Adapter, build: Build, network: resnet.ResNet, recipe: Recipe, strategy: Strategy | None = None
) -> Session:
    """A session of the recipe's network and optimizer. The initial weights come from the seed, or from a file.

    Without a strategy, gradients are not averaged over ranks. Raises RequestError like `Session`, and if `build`
    returns a network whose tensors differ from the table's.
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
        from hvdkit.checkpoint import weights

        state = weights.start_from(Path(recipe.model.weights), state, recipe.model.new_head)
    session.load_state(state)
    startup.done()
    return session
