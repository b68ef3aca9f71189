"""Several ranks in one process: threads over the null adapter, with collectives that are right by inspection."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from hvdkit.core.group import Group, Topology
from hvdkit.core.seam import Pending
from hvdkit.strategies.reducer import Reducer
from tests.local_adapter import LocalAdapter

T = TypeVar("T")
WAIT_S = 300.0  # for the others, who may have little of the processors
_REDUCED: dict[str, Any] = {"sum": np.sum, "average": np.mean, "min": np.min, "max": np.max}


def averaged(reducer: Reducer, tensors: Mapping[str, Any], scale: float | None = None) -> dict[str, Any]:
    """The means of named tensors by a reducer, in their shapes; collective. See `Reducer.packed`."""
    ops, shapes = reducer.transport.adapter, {name: tuple(tensors[name].shape) for name in sorted(tensors)}
    mean = reducer.packed(ops.join([tensors[name] for name in shapes]), shapes, scale)
    return dict(zip(shapes, ops.part(mean, list(shapes.values())), strict=True))


class Crowd:
    """Where `size` members meet. Names must agree, as Horovod would have it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._lock, self._barriers, self._boards = threading.Lock(), {}, {}

    def exchange(self, rank: int, value: Any, name: str, group: tuple[int, ...]) -> list[Any]:
        """Everyone's value in the order of the group."""
        with self._lock:
            barrier = self._barriers.setdefault(group, threading.Barrier(len(group)))
            board = self._boards.setdefault(group, {})
        board[rank] = (name, value)
        barrier.wait(timeout=WAIT_S)
        found = [board[each] for each in group]
        barrier.wait(timeout=WAIT_S)
        assert {told for told, _ in found} == {name}, found
        return [value for _, value in found]

    def abort(self) -> None:
        with self._lock:
            for barrier in self._barriers.values():
                barrier.abort()


class Member(LocalAdapter):
    """One rank's adapter; `sent` counts the bytes that have left it, as rings would send them."""

    def __init__(self, crowd: Crowd, rank: int) -> None:
        self._crowd, self._rank = crowd, rank

    def _everyone(self, value: Any, name: str, group: Group) -> list[Any]:
        return self._crowd.exchange(self._rank, value, name, group.ranks)

    def allreduce(
        self,
        tensors: list[Any],
        group: Group,
        op: str = "average",
        name: str = "allreduce",
        overwrite: bool = False,
    ) -> Any:
        everyone = self._everyone(tensors, name, group)
        return [np.asarray(_REDUCED[op](each, axis=0), each[0].dtype) for each in zip(*everyone, strict=True)]

    def allgather(self, tensor: Any, group: Group, name: str = "allgather") -> Any:
        return np.concatenate(self._everyone(tensor, name, group))

    def broadcast(self, tensor: Any, group: Group, root_rank: int, name: str = "broadcast") -> Any:
        return self._everyone(tensor, name, group)[group.ranks.index(root_rank)].copy()

    def alltoall(self, tensor: Any, group: Group, name: str = "alltoall", splits: list[int] | None = None) -> Any:
        size = group.size
        ends = np.cumsum(splits if splits else [len(tensor) // size] * size)
        assert ends[-1] == len(tensor)
        everyone = self._everyone(np.split(tensor, ends[:-1]), name, group)
        return np.concatenate([parts[group.index] for parts in everyone])

    def reducescatter(self, tensor: Any, group: Group, op: str = "average", name: str = "reducescatter") -> Any:
        (mean,) = self.allreduce([tensor], group, op, name)
        return np.split(mean, group.size)[group.index]

    def allgather_object(self, value: Any, group: Group, name: str = "allgather_object") -> list[Any]:
        return self._everyone(value, name, group)

    def start(self, what: Any, tensor: Any, group: Group, name: str, out: Any = None) -> Any:
        if what != "average":
            return super().start(what, tensor, group, name, out)
        # others still read what they are given
        tensor[...] = self.allreduce([tensor.copy()], group, "average", name)[0]
        return Pending(tensor)


def together(size: int, work: Callable[[Any, Topology], T], hosts: int = 1) -> list[T]:
    """What `work` returns on each of so many ranks, which run at once on so many hosts."""
    crowd, results, faults = Crowd(size), [None] * size, []
    each = size // hosts

    def one(rank: int) -> None:
        topology = Topology(rank, size, rank % each, each, rank // each, hosts)
        try:
            results[rank] = work(Member(crowd, rank), topology)
        except BaseException as error:
            faults.append(error)
            crowd.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    real = [fault for fault in faults if not isinstance(fault, threading.BrokenBarrierError)]
    if faults:
        raise (real or faults)[0]
    return results
