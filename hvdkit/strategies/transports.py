"""Transports: how tensors are reduced and gathered over the ranks, and the bytes that one rank sends.

Bytes are payload, without protocol overhead. Horovod over Gloo reduces and gathers in a ring, in which all ranks send
the same number of bytes; if ranks differ, the busiest rank is counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.group import Group, Mesh, ProcessSet, Ranks
from hvdkit.core.seam import Adapter
from hvdkit.core.tensors import Tensor
from hvdkit.strategies.dense import ring_bytes

Transport = TypeVar("Transport", bound="Ring")


def _traced(collective: Callable[[Transport, Tensor], Tensor]) -> Callable[[Transport, Tensor], Tensor]:
    """While trace events are recorded, record when the tensor is sent and when the result is received."""

    @functools.wraps(collective)
    def mark(transport: Transport, tensor: Tensor) -> Tensor:
        if not trace_events.recording():
            return collective(transport, tensor)
        transport.adapter.to_numpy(tensor[:1])  # waits until an asynchronous framework has computed it
        trace_events.mark(trace_events.SENT)
        result = collective(transport, tensor)
        transport.adapter.to_numpy(result[:1])
        trace_events.mark(trace_events.RECEIVED)
        return result

    return mark


class Ring:
    """Horovod's own collectives. `sent` counts the bytes since the start; `name` is the prefix of their names."""

    def __init__(self, adapter: Adapter, mesh: Mesh, name: str = "reducer") -> None:
        self.adapter, self.data, self.sent = adapter, mesh.data, 0.0
        self._topology, self._name = mesh.topology, name

    @_traced
    def mean(self, vector: Tensor) -> Tensor:
        """The mean over the data axis of vectors with equal length and dtype."""
        if self.data.size == 1:
            return vector
        size, topology = self.bytes_of(vector), self._topology
        lanes = topology.shared_memory_ranks and topology.cross_size > 1 and self.data.size == topology.size
        crossing = ring_bytes(size, topology.cross_size) if lanes else None
        self._put("allreduce", vector, ring_bytes(size, self.data.size), crossing)
        return self.adapter.allreduce([vector], self.data, name=f"{self._name}.mean")[0]

    @_traced
    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of the data axis, of equal shape, concatenated along the first axis in rank order."""
        if self.data.size == 1:
            return tensor
        self._put("allgather", tensor, (self.data.size - 1) * self.bytes_of(tensor))
        return self.adapter.allgather(tensor, self.data, name=f"{self._name}.gather")

    @_traced
    def exchange(self, tensor: Tensor) -> Tensor:
        """All-to-all: split the first axis into one equal part per rank and send rank r the r-th part.

        Returns the received parts, concatenated in rank order.
        """
        size = self.data.size
        if size == 1:
            return tensor
        self._put("alltoall", tensor, (size - 1) / size * self.bytes_of(tensor))
        return self.adapter.alltoall(tensor, self.data, name=f"{self._name}.exchange")

    def bytes_of(self, tensor: Tensor) -> int:
        """A tensor's size in bytes."""
        return int(np.prod(tensor.shape)) * np.dtype(self.adapter.dtype(tensor)).itemsize

    def _put(self, kind: str, tensor: Tensor, sent: float, crossing: float | None = None) -> None:
        """Count the bytes that a collective sends, and record its input as a trace event, because Horovod's timeline
        has only some of the results.

        `crossing` is the number of bytes that it sends in one direction over the busiest link: between hosts if there
        are several, else between ranks. By default it is `sent`.
        """
        self.sent += sent
        crossing = sent if crossing is None else crossing
        if trace_events.recording():
            trace_events.mark(f"{trace_events.PUT}{kind}:{self.bytes_of(tensor)}:{crossing:.0f}")


class Central(Ring):
    """A central parameter server: the first rank receives all vectors, adds them up, and sends the mean back."""

    @_traced
    def mean(self, vector: Tensor) -> Tensor:
        """As `Ring.mean`; rank 0 sends and receives as much as all other ranks together."""
        adapter, size, length = self.adapter, self.data.size, int(vector.shape[0])
        if size == 1:
            return vector
        sent = (size - 1) * self.bytes_of(vector)  # rank 0's, to each of the others
        # One element for each other rank, because not every framework supports tensors without elements.
        filling = adapter.cast(adapter.from_numpy(np.zeros(size - 1, np.float32)), adapter.dtype(vector))
        pushed = adapter.concat([vector, filling])
        there = size - (self._topology.local_size if self._topology.cross_size > 1 else 1)
        self._put("alltoall", pushed, sent, there * self.bytes_of(vector))
        got = adapter.alltoall(pushed, self.data, name=f"{self._name}.push", splits=[length] + [1] * (size - 1))
        total = vector
        if self.data.index == 0:
            total = sum((got[rank * length : (rank + 1) * length] for rank in range(1, size)), got[:length])
            total = total / size
        self._put("broadcast", total, 0.0, self.bytes_of(total))
        return adapter.broadcast(total, self.data, self.data.root, name=f"{self._name}.pull")


class Hierarchical(Ring):
    """Sums within each host, then between the first ranks of the hosts, then broadcasts within each host.

    It uses Horovod's process sets: the slow network between hosts carries one ring with one rank per host.
    """

    def __init__(self, adapter: Adapter, mesh: Mesh, name: str = "reducer") -> None:
        super().__init__(adapter, mesh, name)
        mine = mesh.topology.rank
        # All ranks make all sets, in the same order: those of each data axis.
        axes: dict[Ranks, dict[int, list[int]]] = {}
        everyone = adapter.allgather_object((mesh.data.ranks, mesh.topology.cross_rank), mesh.world, f"{name}.hosts")
        for rank, (ranks, host) in enumerate(everyone):
            axes.setdefault(tuple(ranks), {}).setdefault(host, []).append(rank)
        handles: dict[Ranks, ProcessSet | None] = {mesh.world.ranks: None, mesh.data.ranks: mesh.data.handle}
        for hosts in axes.values():
            for ranks in map(tuple, [*hosts.values(), sorted(first for first, *_ in hosts.values())]):
                if len(ranks) > 1 and ranks not in handles:
                    handles[ranks] = adapter.process_set(ranks)

        def group(ranks: Sequence[int]) -> Group:
            index = ranks.index(mine) if mine in ranks else -1
            return Group(tuple(ranks), index, handles.get(tuple(ranks), tuple(ranks)))

        hosts = axes[mesh.data.ranks]
        self._roots = group(sorted(first for first, *_ in hosts.values()))
        self._mine = group(next(ranks for ranks in hosts.values() if mine in ranks))

    @_traced
    def mean(self, vector: Tensor) -> Tensor:
        """As `Ring.mean`; counts the bytes of a host's first rank, including those within the host."""
        total, payload = vector, self.bytes_of(vector)
        inside, between = (ring_bytes(payload, group.size) for group in (self._mine, self._roots))
        if self._mine.size > 1:
            total = self._within(self._mine, total, "inside", inside, inside if self._roots.size == 1 else 0.0)
        if self._roots.size > 1:
            if self._mine.index == 0:
                total = self._within(self._roots, total, "between", between, between)
            else:
                self.sent += between
            if self._mine.size > 1:
                self._put("broadcast", total, payload, 0.0)
                root = self._mine.root
                total = self.adapter.broadcast(total, self._mine, root, f"{self._name}.back.{root}")
        return total / self.data.size

    def _within(self, group: Group, tensor: Tensor, what: str, sent: float, crossing: float) -> Tensor:
        self._put("allreduce", tensor, sent, crossing)
        return self.adapter.allreduce([tensor], group, "sum", f"{self._name}.{what}.{group.root}")[0]


TRANSPORTS: dict[str, Callable[[Adapter, Mesh, str], Ring]] = {
    "ring": Ring,
    "hierarchical": Hierarchical,
    "central": Central,
}
