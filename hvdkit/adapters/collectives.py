"""Collectives of a framework's Horovod, whose functions have the same names in every framework."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdkit.core.seam import Op, Tensor
from hvdkit.core.topology import Topology


class Collectives:
    """The collectives of `hvdkit.core.seam.Adapter`. `hvd` is the framework's Horovod module.

    `counts` converts a list of integers to the tensor that the framework's alltoall takes.
    """

    def __init__(self, hvd: Any, counts: Callable[[list[int]], Tensor]) -> None:
        self._hvd, self._counts = hvd, counts
        self._ops = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max}

    def start(self) -> Topology:
        """Initialize Horovod and return this rank's topology, in which the device is not set yet."""
        hvd = self._hvd
        hvd.init()
        return Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())

    def allreduce(
        self,
        tensors: list[Tensor],
        op: Op = "average",
        name: str = "allreduce",
        within: Any = None,
        overwrite: bool = False,
    ) -> list[Tensor]:
        group = within or self._hvd.global_process_set
        return list(self._hvd.grouped_allreduce(tensors, op=self._ops[op], name=name, process_set=group))

    def allgather(self, tensor: Tensor, name: str = "allgather") -> Tensor:
        return self._hvd.allgather(tensor, name=name)

    def broadcast(self, tensor: Tensor, root_rank: int = 0, name: str = "broadcast", within: Any = None) -> Tensor:
        return self._hvd.broadcast(tensor, root_rank, name=name, process_set=within or self._hvd.global_process_set)

    def alltoall(self, tensor: Tensor, name: str = "alltoall", splits: list[int] | None = None) -> Tensor:
        if splits is None:
            return self._hvd.alltoall(tensor, name=name)
        return self._hvd.alltoall(tensor, self._counts(splits), name=name)[0]

    def process_set(self, ranks: list[int]) -> Any:
        return self._hvd.add_process_set(ranks)

    def reducescatter(self, tensor: Tensor, op: Op = "average", name: str = "reducescatter") -> Tensor:
        return self._hvd.reducescatter(tensor, op=self._ops[op], name=name)

    def allgather_object(self, value: Any, name: str = "allgather_object") -> list[Any]:
        return list(self._hvd.allgather_object(value, name=name))
