"""Collectives of a framework's Horovod, whose functions have the same names in every framework."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdkit.core.group import Group, Ranks, Topology
from hvdkit.core.seam import Op, Tensor


class Collectives:
    """The collectives of `hvdkit.core.seam.Adapter`. `hvd` is the framework's Horovod module.

    `tensor` makes a tensor of an array in main memory, `array` the array of one there.
    """

    def __init__(self, hvd: Any, tensor: Callable[[np.ndarray], Tensor], array: Callable[[Tensor], np.ndarray]) -> None:
        self._hvd, self._tensor, self._array = hvd, tensor, array
        self._ops = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max}
        self._sets: dict[Ranks, Any] = {}

    def start(self, sets: Sequence[Ranks] = ()) -> Topology:
        """Initialize Horovod and return this rank's topology, in which the device is not set yet."""
        hvd = self._hvd
        self._sets = {ranks: hvd.ProcessSet(list(ranks)) for ranks in sets}
        if sets:
            hvd.init(process_sets=list(self._sets.values()))
        else:
            hvd.init()
        return Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())

    def set_of(self, group: Group) -> Any:
        """The group's process set."""
        return self._hvd.global_process_set if group.handle is None else group.handle

    def allreduce(
        self,
        tensors: list[Tensor],
        group: Group,
        op: Op = "average",
        name: str = "allreduce",
        overwrite: bool = False,
    ) -> list[Tensor]:
        process_set = self.set_of(group)
        return list(self._hvd.grouped_allreduce(tensors, op=self._ops[op], name=name, process_set=process_set))

    def allgather(self, tensor: Tensor, group: Group, name: str = "allgather") -> Tensor:
        return self._hvd.allgather(tensor, name=name, process_set=self.set_of(group))

    def broadcast(self, tensor: Tensor, group: Group, root_rank: int, name: str = "broadcast") -> Tensor:
        return self._hvd.broadcast(tensor, root_rank, name=name, process_set=self.set_of(group))

    def alltoall(self, tensor: Tensor, group: Group, name: str = "alltoall", splits: list[int] | None = None) -> Tensor:
        process_set = self.set_of(group)
        if splits is None:
            return self._hvd.alltoall(tensor, name=name, process_set=process_set)
        counts = self._tensor(np.array(splits, np.int32))
        return self._hvd.alltoall(tensor, counts, name=name, process_set=process_set)[0]

    def process_set(self, ranks: Ranks) -> Any:
        return self._sets[ranks] if ranks in self._sets else self._hvd.add_process_set(list(ranks))

    def reducescatter(self, tensor: Tensor, group: Group, op: Op = "average", name: str = "reducescatter") -> Tensor:
        return self._hvd.reducescatter(tensor, op=self._ops[op], name=name, process_set=self.set_of(group))

    def allgather_object(self, value: Any, group: Group, name: str = "allgather_object") -> list[Any]:
        if group.handle is None:
            return list(self._hvd.allgather_object(value, name=name))
        # Horovod's own function takes no process set in every framework.
        mine = np.frombuffer(bytearray(pickle.dumps(value)), np.uint8)
        sizes, everyone = (
            self._array(self.allgather(self._tensor(array), group, f"{name}.{what}"))
            for what, array in (("sizes", np.array([mine.size], np.int64)), ("bytes", mine))
        )
        return [pickle.loads(part.tobytes()) for part in np.split(everyone, np.cumsum(sizes)[:-1])]
