"""Sharded parameters: ZeRO stage 3 (Rajbhandari et al. 2020), over Horovod's allgather and reduce-scatter.

Each rank keeps a share of every block of the model. A block's parameters are gathered before its forward and its
backward pass, while the block before it computes, and freed after them; its gradients are reduce-scattered when
backward has computed them. The root, the parameters of no block, stays from the beginning of forward to the end of
backward, and so does the last block, whose backward follows its forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from hvdkit.core.buckets import BUCKETS_AT_ONCE, Bucket, bucket
from hvdkit.core.group import Group
from hvdkit.core.pieces import ROOT_BLOCK, StateEntry, shape_of
from hvdkit.core.seam import Adapter, Pending
from hvdkit.core.strategy import GRADIENTS
from hvdkit.core.tensors import Tensor
from hvdkit.core.trainable import Block, Divisible, Phase
from hvdkit.strategies.sharded import Sharded, Shares

T = TypeVar("T")


class HeldShares(Shares):
    """Shares of buckets that are in no whole tensor between two steps; at first of the first rank's parameters."""

    def _begin(self) -> None:
        self.vectors = [self._share_of(number, bucket) for number, bucket in enumerate(self.buckets)]

    def _share_of(self, number: int, bucket: Bucket) -> Tensor:
        packed = self.packed(bucket, self.parameters)
        roots = self.adapter.broadcast(packed, self._group, self._group.root, f"{self._label}.start.{number}")
        vector = self.adapter.variable(self.zeros(bucket.share))
        self.adapter.assign(vector, self.own(bucket, roots))
        return vector

    @property
    def stored(self) -> StateEntry:
        return StateEntry(self, dict(zip(self.pieces, self.weights(), strict=True)))

    def weights(self) -> list[Tensor]:
        """The pieces are views of the shares, which are gathered when they are used."""
        return [part for number, vector in enumerate(self.vectors) for part in self.split(number, vector).values()]


class GatheredBlocks:
    """The blocks' memory (`core.trainable.Uses`): gathers a block before it is used, and starts the next one."""

    def __init__(
        self,
        adapter: Adapter,
        trainable: Divisible,
        group: Group,
        order: Sequence[str],
        shares: Mapping[str, Bucket],
        name: str,
    ) -> None:
        sizes = {block: (list(bucket.shapes), bucket.share * bucket.ranks) for block, bucket in shares.items()}
        self._adapter, self._group, self._name = adapter, group, name
        self._memory: Mapping[str, Block] = trainable.divide(sizes, self)
        self._order = [block for block in order if block != ROOT_BLOCK]
        self.kept = {ROOT_BLOCK, *self._order[-1:]}  # from forward to backward
        self._vectors: dict[str, Tensor] = {}
        self._coming: dict[str, Pending] = {}
        self._there: set[str] = set()

    def take(self, vectors: Mapping[str, Tensor]) -> None:
        """The rank's share of each block, which changes in place."""
        self._vectors = dict(vectors)

    def begin(self, block: str, phase: Phase) -> None:
        """Wait until the block is there, and start to gather the one that is used next."""
        self._start(block)
        if block not in self._there:
            self._coming.pop(block)()
            self._there.add(block)
        self._start(self._next(block, phase))

    def end(self, block: str, phase: Phase) -> None:
        """Free the block, unless it is kept for backward."""
        if phase != "forward" or block not in self.kept:
            self._free(block)
        elif block != ROOT_BLOCK:
            self._start(self._next(block, "backward"))

    def walk(self) -> None:
        """Gather as in a forward pass that no backward follows."""
        for block in (ROOT_BLOCK, *self._order):
            self.begin(block, "prediction")
            if block != ROOT_BLOCK:
                self.end(block, "prediction")
        self.free()

    def free(self) -> None:
        """Free all blocks, such as those that a batch has not used."""
        for block in [*self._coming, *self._there]:
            self._free(block)

    def _next(self, block: str, phase: Phase) -> str | None:
        if block == ROOT_BLOCK:
            return self._order[0] if self._order and phase != "backward" else None
        place = self._order.index(block) + (-1 if phase == "backward" else 1)
        return self._order[place] if 0 <= place < len(self._order) else None

    def _start(self, block: str | None) -> None:
        if block is None or block not in self._memory or block in self._there or block in self._coming:
            return
        memory = self._memory[block]
        memory.allocate()
        name = f"{self._name}.block.{block}"
        self._coming[block] = self._adapter.start("allgather", self._vectors[block], self._group, name, memory.vector)

    def _free(self, block: str) -> None:
        if block in self._coming:
            self._coming.pop(block)()
            self._there.add(block)
        if block in self._there:
            self._there.remove(block)
            self._memory[block].free()


class ShardedParameters(Sharded):
    """Each rank keeps its share of parameters, gradients and slots.

    All ranks must compute with the same blocks in the same order.
    """

    _blocks: GatheredBlocks

    def __init__(
        self, adapter: Adapter, group: Group, half: bool = False, accumulate: int = 1, name: str = GRADIENTS
    ) -> None:
        super().__init__(adapter, group, frees=True, half=half, accumulate=accumulate, name=name)
        self.at_once = BUCKETS_AT_ONCE["parameters"]

    def average(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """As `Sharded` does, once backward no longer needs parameters."""
        self._blocks.free()
        return super().average(gradients)

    def evaluated(self, batches: Iterator[T]) -> Iterator[T]:
        """As each forward pass gathers, ranks that have no batch left gather for the others."""
        while True:
            batch = next(batches, None)
            mine = self._adapter.from_numpy(np.array([batch is not None], np.float32))
            (left,) = self._adapter.allreduce([mine], self.group, "sum", f"{self.name}.batches")
            if not self._adapter.to_numpy(left)[0]:
                return
            if batch is None:
                self._blocks.walk()
            else:
                yield batch

    def _divided(self, may_span: bool) -> HeldShares:
        trainable = self.trainable
        assert isinstance(trainable, Divisible)
        names, ranks = trainable.blocks(), self.group.size
        shapes = {name: shape_of(tensor) for name, tensor in trainable.parameters.items()}
        divided = {block: bucket({name: shapes[name] for name in names[block]}, ranks) for block in reversed(names)}
        blocks, held = list(divided.values()), self.session.held()
        shares = HeldShares(self._adapter, trainable, self.group, self.name, may_span, blocks, held)
        self._blocks = GatheredBlocks(self._adapter, trainable, self.group, list(names), divided, self.name)
        shares.parameters = trainable.parameters  # which are in the blocks' memory now
        self._blocks.take(dict(zip(divided, shares.vectors, strict=True)))
        self._once = [number for number, block in enumerate(divided) if block in self._blocks.kept]
        return shares

    def _gathers(self, elements: list[int]) -> int:
        return self._sendings * (2 * sum(elements) - sum(elements[number] for number in self._once))
