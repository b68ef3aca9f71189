"""The step of a model that ranks divide: data × pipeline × tensor, from its blocks and one figure of a device.

A stage's passes follow each other as in training (`core/schedules.py`). A pass takes its work, which is arithmetic at
the device's rate and values that are moved at its memory's, and the sums of its tensor group, which nothing hides
(Shoeybi et al. 2019, section 3), or its launches if they take longer. A message between stages begins when it is
computed, after those before it on the same link. At the end gradients are averaged over the data axis, and weights
updated. Neighbors are neighbors on the tensor axis, then on the data axis, as in `core/group.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple

from hvdkit.core.cuts import BACKWARD, finished
from hvdkit.recipe.communication import Parallel
from hvdkit.results.bench import Collective
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.tasks.parts import evenly

_SERIAL = 0.4  # of launches, for which the device waits, as when it computes again with the same random numbers
_OF_SUM = 2  # launches


class BlockWork(NamedTuple):
    """What a block of the chain does in a forward pass: of a sample, but for `launches` and `parameters`.

    `multiply_adds`, `moved` and `parameters` are divided over a tensor group, `whole` ones are not. `sums` are
    the values of each sum of the group, `sends` what the block gives the next. `moved` are values that are read or
    written outside of matrix products.
    """

    multiply_adds: float
    moved: float = 0.0
    whole_multiply_adds: float = 0.0
    whole_moved: float = 0.0
    parameters: float = 0.0
    whole_parameters: float = 0.0
    launches: float = 0.0
    sums: tuple[float, ...] = ()
    sends: float = 0.0


@dataclass(frozen=True)
class ModelWork:
    """A model's blocks in forward order. `shared` parameters are both of the first and the last (a table of tokens).

    `value_bytes` are those of an activation, `gradient_bytes` of a gradient as it is sent, and `update_bytes` what the
    update of a parameter reads and writes.
    """

    blocks: tuple[BlockWork, ...]
    shared: float = 0.0
    value_bytes: float = 4.0
    gradient_bytes: float = 4.0
    update_bytes: float = 28.0


@dataclass(frozen=True)
class Processor:
    """A device: floating-point operations per second in matrix products, the one figure that is calibrated; its
    memory's rate; and the time of a launch."""

    flop_per_s: float
    memory_bytes_per_s: float
    launch_s: float


class MeshStep(NamedTuple):
    """A step, in seconds, and what it consists of. `bubble` is the part of `passes_s` in which a stage waits, the mean
    over the stages; `tensor_s` is what the busiest stage's passes take for sums."""

    seconds: float
    passes_s: float
    bubble: float
    tensor_s: float
    data_s: float
    update_s: float
    split: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class MeshLinks:
    """What groups of a mesh take for their collectives and messages, over the levels of links that they cross."""

    cluster: Cluster

    @lru_cache(maxsize=4096)  # noqa: B019 - of all meshes together
    def seconds(self, operation: Collective, size: int, stride: int, sent: float) -> float:
        """A collective of `size` ranks, of which every `stride`-th is one, of so many bytes of a rank."""
        if size == 1 or sent <= 0:
            return 0.0
        return float(self._network(size, stride).cost(operation).line(sent))

    def message(self, stride: int, sent: float) -> float:
        """A message from each rank to the one `stride` after it."""
        return self.seconds("broadcast", 2, stride, sent)

    @lru_cache(maxsize=4096)  # noqa: B019 - of all meshes together
    def _network(self, size: int, stride: int) -> ClusterLinks:
        return ClusterLinks(_strided(self.cluster, stride), size)


def _strided(cluster: Cluster, stride: int) -> Cluster:
    """The cluster as a group of every `stride`-th rank sees it, while all such groups communicate at once.

    Links that leave a host are shared by those of its ranks that are in different groups.
    """
    if stride == 1:
        return cluster
    levels, local = [], cluster.ranks_per_host
    for level in cluster.levels:
        ranks = None if level.ranks is None else level.ranks // stride
        is_last = level is cluster.levels[-1]
        if ranks is None or ranks >= 2 or is_last:
            leaves = is_last if level.ranks is None else level.ranks > local
            shared = level.oversubscription * (min(stride, local) if leaves else 1)
            levels.append(level.model_copy(update={"ranks": ranks, "oversubscription": shared}))
    changes = {"levels": levels, "ranks_per_host": max(1, local // stride), "measured": []}
    return cluster.model_copy(update=changes)


@dataclass(frozen=True)
class Divided:
    """A model on a mesh of `axes`, whose `data` is a number, with `samples` of each microbatch."""

    chain: ModelWork
    axes: Parallel
    microbatches: int
    samples: int
    processor: Processor
    links: MeshLinks
    recompute: bool = False
    sharded: bool = False  # the optimizer's state, over the data axis
    serial_s: float = 0.0  # between steps

    @cached_property
    def split(self) -> list[int]:
        """How many blocks each run has."""
        axes = self.axes
        if axes.split != "auto":
            return axes.split
        work = (block.multiply_adds + block.whole_multiply_adds for block in self.chain.blocks)
        return evenly(tuple(work), axes.runs)

    @cached_property
    def runs(self) -> list[Sequence[BlockWork]]:
        """The blocks of each run of the chain."""
        ends = [sum(self.split[:index]) for index in range(len(self.split) + 1)]
        return [self.chain.blocks[start:stop] for start, stop in pairwise(ends)]

    def passes(self, blocks: Sequence[BlockWork]) -> tuple[float, float, float]:
        """The seconds of a run's forward and backward pass, and what of both are sums of the tensor group."""
        sums = {block: sum(map(self._sum, block.sums)) for block in set(blocks)}
        forward = sum(self._work(block, 1, sums[block]) for block in blocks)
        backward = sum(self._work(block, BACKWARD, sums[block]) for block in blocks)
        again = forward if self.recompute else 0.0
        return forward, backward + again, (3 if self.recompute else 2) * sum(sums[block] for block in blocks)

    def _work(self, block: BlockWork, times: int, sums_s: float) -> float:
        """A pass that has so many times the work of a forward pass, with its sums, or its launches if they take longer.

        `_SERIAL` was chosen on two of vTrain's models, of 1,024 and 2,048 (docs/reference/simulation.md).
        """
        processor, parts = self.processor, self.axes.tensor
        flop = 2 * self.samples * (block.multiply_adds / parts + block.whole_multiply_adds)
        moved = self.samples * (block.moved / parts + block.whole_moved) * self.chain.value_bytes
        work = flop / processor.flop_per_s + moved / processor.memory_bytes_per_s
        launches_s = times * (block.launches + _OF_SUM * len(block.sums) * (parts > 1)) * processor.launch_s
        return max(launches_s, times * work + sums_s + _SERIAL * launches_s)

    def _sum(self, values: float) -> float:
        return self.links.seconds("allreduce", self.axes.tensor, 1, values * self.samples * self.chain.value_bytes)

    @cached_property
    def hop_s(self) -> float:
        """A message of a microbatch between stages: the largest of the chain."""
        ends = [run[-1].sends for run in self.runs[:-1]]
        stride = int(self.axes.data) * self.axes.tensor
        return self.links.message(stride, max(ends, default=0.0) * self.samples * self.chain.value_bytes)

    def parameters(self, stage: int) -> float:
        """The parameters of a rank of a stage."""
        blocks = [block for run in self.runs[stage :: self.axes.pipeline] for block in run]
        return sum(block.parameters / self.axes.tensor + block.whole_parameters for block in blocks)

    def step(self) -> MeshStep:
        """A step, by its schedule."""
        stages, axes = range(self.axes.pipeline), self.axes
        times = [self.passes(run) for run in self.runs]
        of_stages = [times[stage :: axes.pipeline] for stage in stages]
        forward, backward = ([[run[kind] for run in of] for of in of_stages] for kind in (0, 1))
        ends = finished(axes.schedule, self.microbatches, forward, backward, self.hop_s)
        busy = [self.microbatches * sum(run[0] + run[1] for run in of) for of in of_stages]
        after = [self._after(stage) for stage in stages]
        last = max(stages, key=lambda stage: ends[stage] + after[stage])
        passes = max(ends)
        return MeshStep(
            seconds=ends[last] + after[last] + self._shared() + self.serial_s,
            passes_s=passes,
            bubble=1 - sum(busy) / len(busy) / passes if passes else 0.0,
            tensor_s=self.microbatches * max(sum(run[2] for run in of) for of in of_stages),
            data_s=self._average(last) + self._shared(),
            update_s=self._update(last),
            split=tuple(self.split),
        )

    def _after(self, stage: int) -> float:
        return self._average(stage) + self._update(stage)

    def _average(self, stage: int) -> float:
        """The mean of gradients over the data axis; sharded, each gets its share, and all get the new weights."""
        copies, size = int(self.axes.data), self.parameters(stage) * self.chain.gradient_bytes
        group = copies, self.axes.tensor
        if not self.sharded:
            return self.links.seconds("allreduce", *group, size)
        return self.links.seconds("reducescatter", *group, size) + self.links.seconds(
            "allgather", *group, size / copies
        )

    def _update(self, stage: int) -> float:
        values = self.parameters(stage) / (int(self.axes.data) if self.sharded else 1)
        return values * self.chain.update_bytes / self.processor.memory_bytes_per_s

    def _shared(self) -> float:
        """The first and the last stage add up their gradients of what both have."""
        axes = self.axes
        if axes.pipeline == 1:
            return 0.0
        stride = (axes.pipeline - 1) * int(axes.data) * axes.tensor
        return self.links.seconds("allreduce", 2, stride, self.chain.shared / axes.tensor * self.chain.gradient_bytes)


def calibrated(chain: ModelWork, samples: int, seconds: float, memory_bytes_per_s: float, launch_s: float) -> Processor:
    """The device whose forward and backward of so many samples through the whole chain take `seconds`.

    Raises ValueError where memory and launches alone take longer.
    """
    return fitted(lambda processor: _alone(chain, samples, processor), seconds, memory_bytes_per_s, launch_s)


def fitted(
    predicted: Callable[[Processor], float], seconds: float, memory_bytes_per_s: float, launch_s: float
) -> Processor:
    """The device with which `predicted` gives so many seconds. Raises ValueError where no rate does."""

    def device(exponent: float) -> Processor:
        return Processor(math.exp(exponent), memory_bytes_per_s, launch_s)

    low, high = math.log(1e3), math.log(1e21)
    if predicted(device(high)) > seconds:
        raise ValueError(f"{seconds:g} s are less than memory, launches and links take")
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if predicted(device(middle)) > seconds else (low, middle)
    return device(high)


def _alone(chain: ModelWork, samples: int, processor: Processor) -> float:
    no_links: MeshLinks = None  # type: ignore[assignment]
    way = Divided(chain, Parallel.model_construct(data=1, tensor=1, pipeline=1), 1, samples, processor, no_links)
    return sum(way._work(block, 1 + BACKWARD, 0.0) for block in chain.blocks)
