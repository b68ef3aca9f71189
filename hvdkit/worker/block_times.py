"""`parallel.costs: measured`: what each block's passes take on these ranks, before the chain is cut.

Each rank trains one block after the other, alone, with a microbatch of the data, by the passes of a stage that has only
this block (`core/passes.py`), so that no rank needs memory for the whole model. A block's time is the median over the
ranks, which then cut the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdkit.core import cuts
from hvdkit.core.precision import PRECISIONS
from hvdkit.data.dataset import BatchedSplit, StreamedSplit, own_share
from hvdkit.errors import RequestError
from hvdkit.heartbeat import say
from hvdkit.recipe.communication import Parallel
from hvdkit.recipe.optimizer import Loss
from hvdkit.recipe.parallel import microbatches_of
from hvdkit.worker import divided
from hvdkit.worker.memory_limits import limits, now

if TYPE_CHECKING:
    from hvdkit.core.seam import AnyLoss, Model
    from hvdkit.worker.setup import Setup

_LEAST, _MOST, _LONG_S = 3, 20, 0.3  # passes of a block that are timed, and after which there are no more


def measured(setup: Setup) -> Setup:
    """The setup, whose recipe has each block's time and the cut by them; collective over all ranks.

    Raises RequestError, the same on all ranks, if no cut fits into the memory that they have.
    """
    recipe, world, adapter = setup.recipe, setup.mesh.world, setup.adapter
    own = list(_seconds(setup))
    has, limit = now(), limits(setup.mesh.topology.local_size, 0, gpu=False)
    spare = min(limit.resident - has.resident, limit.space - has.space)
    every = adapter.allgather_object((own, spare), world, name="parallel.costs")
    costs = [float(f"{1e3 * median(of):.4g}") for of in zip(*(times for times, _ in every), strict=True)]
    axes = recipe.parallel.model_copy(update={"costs": costs})
    room = min(spare for _, spare in every)
    recipe = recipe.model_copy(update={"parallel": axes})
    axes = cuts.resolved(recipe, setup.architecture, max(0, room))
    assert axes.split != "auto"
    if cuts.costs_of(setup.architecture):  # else its memory is not known
        most = max(cuts.kept_by_stage(recipe, setup.architecture, axes.split))
        if most > room:
            raise RequestError(
                f"parallel.split: expected a cut into {axes.pipeline} stages of which each fits into the "
                f"{room / 2**20:,.0f} MiB that a rank has left; the fullest one's state and activations need at least "
                f"{most / 2**20:,.0f}; give a smaller batch_size, or look with `hvdkit plan`"
            )
    if setup.mesh.is_root:
        took = ", ".join(f"{ms:.3g}" for ms in cuts.passes_ms(axes, cuts.passes_of(recipe)) or [])
        say(f"parallel: blocks measured; split {axes.split}, passes of {took} ms a step; as numbers: costs={costs}")
    return replace(setup, recipe=recipe.model_copy(update={"parallel": axes}))


def _seconds(setup: Setup) -> Iterator[float]:
    """A microbatch's forward and backward pass through each block."""
    adapter, recipe = setup.adapter, setup.recipe
    train = own_share(setup.dataset.train)
    if isinstance(train, BatchedSplit | StreamedSplit) or not len(train):
        expected = "expected counted for samples that cannot be read by number"
        raise RequestError(f"parallel.costs: {expected}, got measured and a {type(train).__name__}")
    size = recipe.batch_size // microbatches_of(recipe.parallel, recipe.batch_size)
    batch = train.batch(np.arange(size) % len(train))
    received: Any = None
    blocks = _blocks(setup)
    for block in range(len(blocks)):
        trainable = adapter.bind(blocks[block](), _loss(setup), recipe.precision)
        samples, targets = trainable.inputs(batch)
        is_last, stage, times = block == len(blocks) - 1, adapter.stage(trainable), list[float]()
        given, needs = (samples, not trainable.parameters) if received is None else (received, True)
        while len(times) <= _LEAST or (len(times) <= _MOST and sum(times[1:]) < _LONG_S):
            begun = time.perf_counter()
            passed = stage.forward(given, targets if is_last else None, needs)
            passed.backward(None if is_last else passed.outputs)
            times.append(time.perf_counter() - begun)
        received = passed.outputs
        yield median(times[1:])  # the first one is slower


def _blocks(setup: Setup) -> Sequence[Callable[[], Model]]:
    """What makes each of the model's blocks, as a model of its own."""
    table, recipe = setup.architecture, setup.recipe
    if setup.task.own:
        chain, _ = divided.chain_of(setup.adapter, setup.task, setup.script.build(table), setup.dataset)
        return [partial(chain.chunk, number, number + 1) for number in range(len(chain.blocks))]
    precision = PRECISIONS[recipe.precision]
    table = replace(table, dtype=precision.parameters, compute_dtype=precision.compute, recompute=recipe.recompute)
    count = len(cuts.costs_of(table))
    single = Parallel(pipeline=count, split=[1] * count)
    return [partial(setup.script.build, table.staged(single, number)) for number in range(count)]


def _loss(setup: Setup) -> AnyLoss:
    loss = setup.task.loss or setup.recipe.loss
    if isinstance(loss, Loss) and not loss.counts:
        return loss
    from hvdkit.core.counting import Counting  # a loss that is a mean does not need it

    return Counting(setup.adapter, setup.adapter.cross_entropy(loss) if isinstance(loss, Loss) else loss)
