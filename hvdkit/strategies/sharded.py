"""Sharded training: ZeRO stages 1 and 2 (Rajbhandari et al. 2020), over Horovod's reduce-scatter and allgather.

Each rank has a share of the optimizer's state. Gradients are reduce-scattered, so that it receives the means for its
share alone; it updates that, and the new weights are gathered. In stage 2 a bucket of gradients is sent as soon as
backward has computed it, where the framework reports that, and the gradients themselves are then freed.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.buckets import BUCKETS_AT_ONCE, Bucket, buckets
from hvdkit.core.group import Group
from hvdkit.core.pieces import BUCKET_BYTES, Partition, Piece, StateEntry, shape_of
from hvdkit.core.seam import Adapter, Pending
from hvdkit.core.strategy import GRADIENTS, Strategy
from hvdkit.core.tensors import Tensor
from hvdkit.core.trainable import Divisible, Hooks, Joined, Trainable
from hvdkit.core.update_rules import rule_of
from hvdkit.recipe.schema import Optimizer
from hvdkit.strategies.dense import from_wire, on_wire, ring_bytes


class Shares(Partition):
    """This rank's share of each bucket, as pieces named `BUCKET.PIECE`, such as `0.1`. A subclass has the tensors.

    Buckets are of the tensors that this rank's model has, which are `held` pieces of the whole ones: parts of layers,
    or a stage's. Tensors are gathered over the shares first, then as `held` has them.

    With `may_span` all elements of a piece may be updated by one call of the optimizer's rule, which depends on no
    norms; otherwise each piece is of one parameter.
    """

    def __init__(
        self,
        adapter: Adapter,
        trainable: Trainable,
        group: Group,
        label: str,
        may_span: bool,
        divided: Sequence[Bucket],
        held: Partition,
    ) -> None:
        super().__init__(adapter, trainable.parameters, label=label)
        self.buckets, self._group, self._trainable, self._held = divided, group, trainable, held
        self.shapes, self.dtypes, held.parameters = held.shapes, held.dtypes, {}  # which may be freed
        counted = {name: held.counted(name) for name in self.parameters}
        order = list(dict.fromkeys(counted.values()))
        self._kinds = {name: order.index(of_name) for name, of_name in counted.items()}
        groups = group, *held.groups
        self._of_bucket = [bucket.pieces(group.index, may_span, groups, self._kinds) for bucket in divided]
        self.pieces = {
            f"{number}.{place}": piece
            for number, pieces in enumerate(self._of_bucket)
            for place, piece in enumerate(pieces)
        }
        self.bucket_of = {name: number for number, bucket in enumerate(divided) for name in bucket.shapes}
        self._begin()

    def _begin(self) -> None:
        """Put the parameters where the shares have them."""

    @property
    def stored(self) -> StateEntry:
        return StateEntry(self._held, self.parameters)

    def local(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return {name: piece.of(arrays) for name, piece in self._held.pieces.items() if name in arrays}

    def own(self, bucket: Bucket, vector: Tensor) -> Tensor:
        """This rank's share of a bucket's vector."""
        start = self._group.index * bucket.share
        return vector[start : start + bucket.share]

    def packed(self, bucket: Bucket, tensors: Mapping[str, Tensor]) -> Tensor:
        """A bucket's tensors as one vector, with its padding."""
        padding = [self.zeros(bucket.padding)] if bucket.padding else []
        return self.adapter.joined([*(tensors[name] for name in bucket.shapes), *padding])

    def split(self, number: int, share: Tensor) -> dict[str, Tensor]:
        """A share of a bucket, as pieces by name."""
        parts = self.adapter.part(share, [piece.local_shape for piece in self._of_bucket[number]])
        return {f"{number}.{place}": part for place, part in enumerate(parts)}

    def gather(self, tensors: Mapping[str, Tensor], names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """As `Partition.gather`. In the order of buckets, no bucket is gathered twice; ranks of `held` have others."""
        if names is None:
            names = self.shapes if self._held.groups else self.bucket_of
        return self._held.gather(_Gathered(self, tensors), names)

    def bucket_with(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A tensor and its bucket's others, as this rank's model has them, from all ranks' pieces; collective."""
        number = self.bucket_of[name]
        own = [tensors[f"{number}.{place}"] for place in range(len(self._of_bucket[number]))]
        return self._of_shares(number, self.adapter.joined(own))

    def sum_of_squares(self, norms: list[Tensor]) -> Tensor:
        """Of tensors of a kind first, over the shares; the result stands for the first such tensor."""
        if not self._held.groups:
            return super().sum_of_squares(norms)
        ops, squares = self.adapter, {kind: self.zeros(1) for kind in self._kinds.values()}
        for piece, norm in zip(self.pieces.values(), norms, strict=True):
            squares[self._kinds[piece.name]] += ops.reshape(norm * norm, (1,))
        totals = self._summed(ops.concat(list(squares.values())), self._group)
        left = dict(zip(squares, ops.part(ops.sqrt(totals), [(1,)] * len(squares)), strict=True))
        none = self.zeros(1)
        return self._held.sum_of_squares([left.pop(self._kinds[name], none) for name in self._held.pieces])

    def _partial(self, group: Group) -> Collection[str]:
        return self.bucket_of if group is self._group else self._held._partial(group)

    def _of_shares(self, number: int, share: Tensor) -> dict[str, Tensor]:
        """A bucket's tensors from all ranks' shares."""
        bucket = self.buckets[number]
        vector = self.adapter.allgather(share, self._group, f"{self._label}.gather.{number}")
        padding = [(bucket.padding,)] if bucket.padding else []
        parts = self.adapter.part(vector, [*bucket.shapes.values(), *padding])
        return dict(zip(bucket.shapes, parts, strict=False))


class _Gathered(dict[str, Tensor]):
    """The tensors of this rank's model by name, of which `tensors` has all ranks' pieces: a bucket at a time."""

    def __init__(self, shares: Shares, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._shares, self._tensors = shares, tensors

    def __missing__(self, name: str) -> Tensor:
        self.clear()  # before the next is in memory
        self.update(self._shares.bucket_with(name, self._tensors))
        return self[name]


class CopiedShares(Shares):
    """Shares of buckets whose parameters are tensors of their own: pieces are copied from them, and back."""

    def weights(self) -> list[Tensor]:
        return [self._copied(piece) for piece in self.pieces.values()]

    def _copied(self, piece: Piece) -> Tensor:
        ops = self.adapter
        parts = [ops.reshape(self.parameters[part.name], (-1,))[part.start : part.stop] for part in piece.parts]
        return self.adapter.joined([*parts, self.zeros(piece.padding)] if piece.padding else parts)

    def store(self, weights: Iterable[Tensor]) -> None:
        shares = iter(weights)
        for number, pieces in enumerate(self._of_bucket):
            share = self.adapter.joined(list(itertools.islice(shares, len(pieces))))
            for name, value in self._of_shares(number, share).items():
                self.adapter.assign(self.parameters[name], value)

    def distribute(self, weights: list[Tensor]) -> None:
        self.store(weights)


class FlatShares(Shares):
    """Shares of buckets whose parameters are parts of one vector, into which all shares are gathered without a copy."""

    def _begin(self) -> None:
        before = (
            self._trainable.parameters
        )  # each is freed after its bucket's copy, so that no two models are in memory
        sizes = {str(n): (list(bucket.shapes), bucket.share * bucket.ranks) for n, bucket in enumerate(self.buckets)}
        self._vectors, self._own = [], []
        assert isinstance(self._trainable, Divisible)
        for bucket, memory in zip(self.buckets, self._trainable.divide(sizes).values(), strict=True):
            packed = self.packed(bucket, {name: before.pop(name) for name in bucket.shapes})
            memory.allocate()
            self.adapter.assign(memory.vector, packed)
            self._vectors.append(memory.vector)
            self._own.append(self.own(bucket, memory.vector))
        self.parameters = self._trainable.parameters

    def weights(self) -> list[Tensor]:
        return [part for number, own in enumerate(self._own) for part in self.split(number, own).values()]

    def distribute(self, weights: list[Tensor]) -> None:
        pending = [
            self.adapter.start("allgather", own, self._group, f"{self._label}.gather.{number}", vector)
            for number, (own, vector) in enumerate(zip(self._own, self._vectors, strict=True))
        ]
        for wait in pending:
            wait()


class Sharded(Strategy):
    """Reduce-scatters gradients by bucket. With `frees` (stage 2) each rank keeps only its share of them.

    It then sends the gradients of each of the `accumulate` batches of an update, and adds up shares alone. With `half`
    gradients are sent in float16, as in `Dense`.
    """

    overlaps = True
    group: Group

    def __init__(
        self,
        adapter: Adapter,
        group: Group,
        frees: bool,
        half: bool = False,
        most_bytes: int = BUCKET_BYTES,
        accumulate: int = 1,
        name: str = GRADIENTS,
    ) -> None:
        self._adapter, self.group, self._half, self._most_bytes, self.name = adapter, group, half, most_bytes, name
        self.keeps_shares, self._sendings = frees, accumulate if frees else 1
        self.at_once = BUCKETS_AT_ONCE["gradients" if frees else "optimizer"]
        self._joins = not half and not frees and accumulate == 1  # then what backward returns is sent as it is
        self._joined: Joined | None = None
        self._waiting: dict[int, dict[str, Tensor]] = {}  # gradients of buckets that are not sent
        self._under_way: dict[int, tuple[Pending, str | None]] = {}  # by bucket: its share, own dtype
        self._received: dict[int, Tensor] = {}  # by bucket
        self._next = 0  # the bucket that is sent next: all ranks send them in one order

    def partition(self, settings: Optimizer) -> Shares:
        """This rank's share of the parameters."""
        self._shares = self._divided(not rule_of(settings).is_layerwise)
        elements = [bucket.share * self.group.size for bucket in self._shares.buckets]
        if self._joins and isinstance(self.trainable, Hooks) and not self.trainable.overlaps:
            names = [list(bucket.shapes) for bucket in self._shares.buckets]
            self._joined = self.trainable.join_gradients(list(zip(names, elements, strict=True)))
        itemsize = np.dtype(self.session.dtype).itemsize
        sent = self._sendings * (2 if self._half else itemsize) * sum(elements) + itemsize * self._gathers(elements)
        # Gradients are reduce-scattered, weights gathered: each is half of an allreduce in a ring.
        self._bytes = ring_bytes(sent / 2, self.group.size)
        return self._shares

    def _divided(self, may_span: bool) -> Shares:
        shapes = {name: shape_of(tensor) for name, tensor in self.trainable.parameters.items()}
        divided = buckets(shapes, self.group.size, np.dtype(self.session.dtype).itemsize, self._most_bytes)
        kind = FlatShares if "shard-parameters" in self._adapter.CAPABILITIES else CopiedShares
        held = self.session.held()
        return kind(self._adapter, self.trainable, self.group, self.name, may_span, divided, held)

    def _gathers(self, elements: list[int]) -> int:
        """How many elements are gathered for an update, if buckets have so many."""
        return sum(elements)

    def average(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The means over the group of each piece of this rank's share; waits for buckets that `begin` has sent."""
        left = range(self._next, len(self._shares.buckets))
        if not left:
            self.trainable.stamp((trace_events.SENT,), [])
        for number in left:
            both = {**gradients, **self._waiting.pop(number, {})}
            self._send(number, both, (trace_events.SENT,) if number == left[0] else ())
            self._receive_first(self.at_once)
        self._next = 0
        pieces: dict[str, Tensor] = {}
        for number in range(len(self._shares.buckets)):
            if number in self._under_way:
                self._receive(number)
            pieces |= self._shares.split(number, self._received.pop(number))
        return dict(zip(pieces, self.trainable.stamp((trace_events.RECEIVED,), list(pieces.values())), strict=True))

    def begin(self, name: str, gradient: Tensor) -> bool:
        """Take a gradient, and send its bucket when it is complete."""
        self._waiting.setdefault(self._shares.bucket_of[name], {})[name] = gradient
        while self._is_complete(self._next):
            self._send(self._next, self._waiting.pop(self._next))
            self._next += 1
            if self.keeps_shares:
                self._receive_first(self.at_once)
        return self.keeps_shares

    def _is_complete(self, number: int) -> bool:
        return number in self._waiting and len(self._waiting[number]) == len(self._shares.buckets[number].shapes)

    def _send(self, number: int, gradients: Mapping[str, Tensor], events: tuple[str, ...] = ()) -> None:
        packed, dtype = on_wire(self._adapter, self._packed(number, gradients), self._half)
        (packed,) = self.trainable.stamp(events, [packed])
        name = f"{self.name}.{number}"
        self._under_way[number] = self._adapter.start("reducescatter", packed, self.group, name), dtype

    def _receive_first(self, at_most: int) -> None:
        """Receive what has come; wait until at most `at_most` buckets are under way, so that memory is freed."""
        for sent in list(self._under_way):
            if self._under_way[sent][0].ready() or len(self._under_way) > at_most:
                self._receive(sent)

    def _packed(self, number: int, gradients: Mapping[str, Tensor]) -> Tensor:
        if self._joined is not None and self._joined.holds(gradients):
            return self._joined.vectors[number]
        return self._shares.packed(self._shares.buckets[number], gradients)

    def _receive(self, number: int) -> None:
        pending, dtype = self._under_way.pop(number)
        self._received[number] = from_wire(self._adapter, pending(), dtype)
