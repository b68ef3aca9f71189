"""The memory that a rank needs for a recipe, from the model's table: nothing is run, and no data is opened."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hvdkit import tasks
from hvdkit.adapters import capabilities
from hvdkit.core import cuts
from hvdkit.core.buckets import BUCKETS_AT_ONCE
from hvdkit.core.pieces import BUCKET_BYTES, ROOT_BLOCK
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.schedules import actions, alive
from hvdkit.core.update_rules import rule_of
from hvdkit.data.counts import KNOWN
from hvdkit.defaults import FRAMEWORK
from hvdkit.recipe.parallel import microbatches_of
from hvdkit.recipe.schema import GptModel, ImageFolder, Recipe, Synthetic
from hvdkit.results.memory import Parts, Stage
from hvdkit.results.profile import ITEM_BYTES
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.simulator import sharding
from hvdkit.simulator.sharding import States
from hvdkit.tasks.parts import NthPlace, block_of, bounds
from hvdkit.tasks.task import Architecture
from hvdkit.worker import tuning

_TARGET_BYTES = 8  # of a class or a token
_AT_ONCE = 2  # blocks that stage `parameters` holds beside the root: the one that computes, and the next
_OF_GPU = 0.9
# What is known of the count where nothing was fitted to it (docs/memory.md).
ON_CPUS = "on CPUs, under PyTorch, the count was 8 % below to 11 % above the peaks of ranks to which it was not fitted"
_ROUNDS = 3  # of cuts, each by what the one before it needs
_LARGEST_BATCH = 2**24  # that a recipe takes


def framework_of(name: str) -> str:
    """The framework whose own memory is counted: PyTorch's for what was not measured under one that hvdkit has."""
    return name if name in FRAMEWORKS else FRAMEWORK


def sample_shape(recipe: Recipe) -> tuple[int, ...] | None:
    """The shape of a sample; None where only the ranks know it."""
    data, model = recipe.data, recipe.model
    if isinstance(model, GptModel):
        return (tasks.choose(recipe).units,)
    if isinstance(data, Synthetic):
        return data.height, data.width, data.channels
    if isinstance(data, ImageFolder):
        return None if data.size == "auto" else (data.size, data.size, 3)
    return KNOWN[data.name].shape if data.name in KNOWN else None


def parts(recipe: Recipe, shape: tuple[int, ...] | None, framework: str, gpu: bool, ranks: int, stage: Stage) -> Parts:
    """What the rank with the most keeps, of `ranks` along the data axis, for samples of `shape`.

    A model that only its script knows has no bytes.
    """
    stages = range(recipe.parallel.pipeline)
    of_stages = [parts_of_stage(recipe, shape, framework, gpu, ranks, stage, number) for number in stages]
    return max(of_stages, key=lambda needs: needs.total)


def parts_of_stage(
    recipe: Recipe, shape: tuple[int, ...] | None, framework: str, gpu: bool, ranks: int, stage: Stage, number: int
) -> Parts:
    """As `parts`, on the ranks of one stage of a pipeline, counted from 0."""
    whole, precision = tasks.choose(recipe).architecture(shape), PRECISIONS[recipe.precision]
    axes = cuts.resolved(recipe, whole)
    tables = [whole]
    if axes.pipeline > 1:  # a stage's chunks
        tables = [whole.staged(axes, run) for run in range(number, axes.runs, axes.pipeline)]
    if axes.tensor > 1:  # none has more than the last
        tables = [replace(table, tensor=NthPlace(axes.tensor - 1, axes.tensor)) for table in tables]
    sizes = {name: size for table in tables for name, size in _held(table).items()}
    full, low = ITEM_BYTES[precision.parameters], ITEM_BYTES[precision.compute]
    count = sum(sizes.values())
    slots, averages = len(rule_of(recipe.optimizer).slots), int(recipe.average_weights is not None)
    staged = axes.pipeline > 1 and framework not in capabilities.ADDS_IN_BACKWARD
    sums = (recipe.accumulate > 1 and axes.pipeline == 1) or staged
    state_bytes = States(full, full * (2 if sums else 1), full * (slots + averages))
    kept = sharding.held(state_bytes, count, ranks, stage)
    average = int(kept.optimizer) * averages // (slots + averages) if averages else 0  # divided as slots are
    gathers = stage == "parameters" and ranks > 1
    present = _gathered(whole) if gathers else count  # parameters that are there at once
    # Backward keeps the casts of all weights, unless blocks are computed again.
    casts = (present if recipe.recompute else count) * low if low < full else 0
    gathered = present * full if gathers else 0
    activations, batch, pass_bytes = _of_samples(recipe, tables, shape, framework, number)
    on_heap = not gpu and (stage == "none" or ranks == 1)
    way = "pipeline" if axes.pipeline > 1 else "tensor" if axes.tensor > 1 else "data"
    unused = capabilities.UNUSED_OF_ACTIVATIONS.get(framework, {}).get(way, 0.0) * on_heap
    scratch = unused * (pass_bytes if way == "pipeline" else activations or 0)
    if unused and recipe.recompute and activations is not None:  # what a block computes again fits no freed piece
        stored = _of_samples(recipe.model_copy(update={"recompute": False}), tables, shape, framework, number)[0]
        scratch = max(scratch, (stored or 0) - activations)
    # In a pipeline, neither microbatches' gradients nor the means find a place where activations were.
    sets = 3 * (way == "pipeline" and unused > 0)
    own = capabilities.RESIDENT_MIB[framework]["gpu" if gpu else "cpu"]
    if not gpu:
        more = capabilities.MORE_RESIDENT_MIB.get(framework, {})
        own += more.get("convolutions", 0) * (not isinstance(recipe.model, GptModel))
        own += more.get("first stage", 0) * (axes.pipeline > 1 and number == 0)
    values = list(sizes.values())
    communication = _communication(recipe, whole, values, framework, full, gpu, ranks, stage) if ranks > 1 else 0
    if axes.pipeline > 1:
        ends = (whole.staged(axes, run).parameter_shapes() for run in (0, axes.runs - 1))
        shared = set.intersection(*map(set, ends))  # both ends add up their gradients of it
        communication += full * sum(size for name, size in sizes.items() if name in shared)
    counted = Parts(
        parameters=int(kept.parameters),
        gradients=int(kept.gradients),
        optimizer=int(kept.optimizer) - average,
        average=average,
        casts=casts,
        gathered=gathered,
        communication=communication,
        activations=activations,
        batch=batch,
        copies=full * count * sets,
        scratch=round(scratch),
        framework=own * 2**20,
    )
    initial = [math.prod(shape) for table in tables for shape in table.parameter_shapes().values()]
    # The initial weights are in main memory beside the model, and a tensor of them once more while it is set.
    start = 0 if gpu else counted.framework + full * (count + sum(initial) + max(initial, default=0))
    # A whole state is packed for a checkpoint, and a tensor of it twice more, when no activations are there.
    saved = counted.parameters + counted.optimizer + counted.average + full * max(initial, default=0)
    packs = on_heap and recipe.checkpoint is not None and axes.model == 1
    checkpoint = packs * (counted.framework + counted.gradients + counted.communication + 2 * saved)
    return counted.model_copy(update={"start": max(0, start - counted.total, checkpoint - counted.total)})


def cut_within(
    recipe: Recipe, shape: tuple[int, ...] | None, framework: str, gpu: bool, ranks: int, room: int
) -> list[int] | None:
    """What `split: auto` stands for where no stage may need more than `room` bytes; None if there is no such cut."""
    table = tasks.choose(recipe).architecture(shape)
    axes, allowed = cuts.resolved(recipe, table), math.inf
    for _ in range(_ROUNDS):
        assert axes.split != "auto"
        cut = recipe.model_copy(update={"parallel": axes})
        totals = [
            parts_of_stage(cut, shape, framework, gpu, ranks, recipe.sharding, stage).total
            for stage in range(axes.pipeline)
        ]
        if max(totals) <= room:
            return axes.split
        if min(totals) > room:
            break
        # What a cut does not decide about, such as the framework's own, stays as it is.
        kept = cuts.kept_by_stage(recipe, table, axes.split)
        others = [total - own for total, own in zip(totals, kept, strict=True)]
        if (less := max(0.0, room - max(others))) >= allowed:
            break
        allowed, axes = less, cuts.resolved(recipe, table, less)
    return None


def _held(table: Architecture) -> dict[str, int]:
    """How many values of each parameter a rank has: of those that tensor parallelism divides, its part."""
    shapes, place = table.parameter_shapes(), table.tensor
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    if place is None:
        return sizes
    for name, cut in ((name, cut) for name, cut in table.cuts().items() if name in shapes):  # no running statistics
        length = shapes[name][cut.axis] // cut.blocks
        start, stop = bounds(length, place.index, place.size)
        sizes[name] = sizes[name] // length * (stop - start)
    return sizes


def usable(device_bytes: int, gpu: bool) -> int:
    """What of a device's memory a rank may fill by this count: of a GPU's nine tenths, as kernels' scratch space and
    the allocator's gaps are not counted (docs/memory.md)."""
    return round(_OF_GPU * device_bytes) if gpu else device_bytes


def largest_batch(needs: Parts, batch_size: int, room: int) -> int | None:
    """The largest batch size that fits into `room` bytes, if `batch_size` needs these; None if that is unknown."""
    if not needs.activations or needs.batch is None:
        return None
    if needs.start and needs.total > room:  # whatever the batch
        return 0
    of_batch = needs.activations + needs.batch + needs.scratch
    fixed = needs.total - needs.start - of_batch
    return max(0, min(_LARGEST_BATCH, (room - fixed) * batch_size // of_batch))


def _of_samples(
    recipe: Recipe, tables: Sequence[Architecture], shape: tuple[int, ...] | None, framework: str, stage: int
) -> tuple[int | None, int | None, int]:
    """Bytes of the activations, in a pipeline of those microbatches that are kept at once, of the batch itself, and of
    the activations of one microbatch and chunk.

    `tables` are a stage's chunks, or the model.
    """
    kept = [table.activations(shape, recipe.recompute) for table in tables] if shape else [None]
    if shape is None or None in kept:
        return None, None, 0
    precision = PRECISIONS[recipe.precision]
    full, low = ITEM_BYTES[precision.parameters], ITEM_BYTES[precision.compute]
    keeps_scores = framework in capabilities.KEEPS_ATTENTION_WEIGHTS
    of_sample = [
        (each.compute + each.scores * keeps_scores - each.outputs) * low + each.full * full for each in kept if each
    ]
    is_text = isinstance(recipe.model, GptModel)
    sample = math.prod(shape) * (_TARGET_BYTES if is_text else full) + (shape[0] if is_text else 1) * _TARGET_BYTES
    size, at_once, axes = recipe.batch_size, sum(of_sample), recipe.parallel
    if axes.pipeline > 1:
        microbatches = microbatches_of(axes, recipe.batch_size)
        size //= microbatches
        listed = actions(axes.schedule, stage, axes.pipeline, microbatches * recipe.accumulate, axes.chunks)
        at_once = alive(listed, of_sample)
    outputs = sum(each.outputs for each in kept if each)
    return size * (at_once + outputs * low), recipe.batch_size * sample, size * (max(of_sample) + outputs * low)


def _communication(
    recipe: Recipe,
    whole: Architecture,
    counts: Sequence[int],
    framework: str,
    value: int,
    gpu: bool,
    ranks: int,
    stage: Stage,
) -> int:
    """The buffer of all gradients, or the buckets of a sharded step; and what compression and Local SGD keep.

    A rank has gradients of so many values each, of `value` bytes. Blocks of the `whole` are divided.
    """
    sizes = [count * value for count in counts]
    gradient_bytes = sum(sizes)
    residuals = int(getattr(recipe.compression, "error_feedback", False))
    copies = 0 if recipe.sync is None else 2 if recipe.sync.outer else 1  # the last common weights, and their velocity
    if stage == "none":
        buffer = max(sizes) if _joins(recipe, framework, gpu) else _fused(recipe, gradient_bytes, gpu)
    elif stage == "parameters":
        buffer = int(value * _blocks_sent(whole, ranks, gpu))
    else:
        largest = min(gradient_bytes, max(BUCKET_BYTES, *sizes))  # a larger tensor is a bucket of its own
        packed = min((BUCKETS_AT_ONCE[stage] + 1) * BUCKET_BYTES, gradient_bytes)  # and the one that waits
        # Gloo's reduce-scatter (runtimes/patches)
        scratch = 2 * largest // ranks if not gpu and ranks > 2 else 0
        if stage == "gradients":  # the others are received after the largest one's backward
            buffer = max(largest + scratch, packed)
        else:  # the means of this rank's share
            means = gradient_bytes // ranks + scratch
            buffer = max(means, *sizes) if _joins(recipe, framework, gpu) else means + packed
    return int(buffer) + gradient_bytes * (residuals + copies)


def _joins(recipe: Recipe, framework: str, gpu: bool) -> bool:
    """Whether gradients are sent from where they are. Beside them there is one until it is copied there."""
    dense = recipe.compression.method == "none" and recipe.sync is None and recipe.allreduce == "ring"
    return (
        dense
        and recipe.accumulate == recipe.parallel.pipeline == 1
        and not gpu
        and framework in capabilities.JOINS_GRADIENTS
    )


def _fused(recipe: Recipe, gradient_bytes: int, gpu: bool) -> int:
    """Horovod's fusion buffer. All of it is taken of a GPU's memory; a host gives pages as they are used."""
    threshold = tuning.choose(recipe, {})[tuning.FUSION].value or tuning.FUSION_BYTES
    return int(threshold if gpu else min(threshold, gradient_bytes))


def _gathered(architecture: Architecture) -> int:
    """The parameters that stage `parameters` holds at once: those of no block, and those of the largest blocks."""
    root, blocks = _blocks(architecture)
    return root + sum(sorted(blocks)[-_AT_ONCE:])


def _blocks_sent(architecture: Architecture, ranks: int, gpu: bool) -> float:
    """The values of gradients that stage `parameters` has beside a rank's shares, at the worse of two moments.

    In backward they are those of the root, whose share is not there yet, of a block, and of two packed blocks. After
    backward they are the root's and a copy of them, and no parameters are gathered.
    """
    root, blocks = _blocks(architecture)
    scratch = 2 * root / ranks if not gpu and ranks > 2 else 0  # of Gloo's reduce-scatter (runtimes/patches)
    after = 2 * root + scratch - _gathered(architecture)
    return max(root - root / ranks + (1 + BUCKETS_AT_ONCE["parameters"]) * max(blocks, default=0), after)


def gathered_once(architecture: Architecture) -> int:
    """The parameters that stage `parameters` gathers once for a batch: the root's, and the last block's."""
    root, blocks = _blocks(architecture)
    return root + (blocks or [0])[-1]


def _blocks(architecture: Architecture) -> tuple[int, list[int]]:
    """The parameters of the root, whose names have no number, and of each block that stage `parameters` gathers."""
    sizes = Counter[str]()
    for name, shape in architecture.parameter_shapes().items():
        block = block_of(name) if any(word.isdigit() for word in name.split(".")) else ROOT_BLOCK
        sizes[block] += math.prod(shape)
    return sizes.pop(ROOT_BLOCK, 0), list(sizes.values())
