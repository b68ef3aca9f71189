"""Collectives for PyTorch: those that have started, and those whose results are waited for."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvdkit.adapters.collectives import Collectives
from hvdkit.adapters.pytorch.tensors import join, part
from hvdkit.core.group import Group
from hvdkit.core.seam import Op


class TorchCollectives(Collectives):
    """Horovod's asynchronous functions, waited for: unlike its others, they record nothing for autograd."""

    def __init__(self) -> None:
        super().__init__(hvd, torch.from_numpy, torch.Tensor.numpy)

    def allreduce(
        self,
        tensors: list[torch.Tensor],
        group: Group,
        op: Op = "average",
        name: str = "allreduce",
        overwrite: bool = False,
    ) -> list[torch.Tensor]:
        settings: Any = {"name": name, "op": self._ops[op], "process_set": set_of(group)}
        if len(tensors) == 1:  # without the bookkeeping of a group
            one = hvd.allreduce_async_ if overwrite else hvd.allreduce_async
            return [hvd.synchronize(one(tensors[0], **settings))]
        if not overwrite or not _may_be_joined(tensors):
            several = hvd.grouped_allreduce_async_ if overwrite else hvd.grouped_allreduce_async
            return list(hvd.synchronize(several(tensors, **settings)))
        joined = join(tensors)
        hvd.synchronize(hvd.allreduce_async_(joined, **settings))
        return part(joined, [tensor.shape for tensor in tensors])

    def allgather(self, tensor: torch.Tensor, group: Group, name: str = "allgather") -> torch.Tensor:
        return hvd.synchronize(hvd.allgather_async(tensor, name=name, process_set=set_of(group)))

    def broadcast(self, tensor: torch.Tensor, group: Group, root_rank: int, name: str = "broadcast") -> torch.Tensor:
        return hvd.synchronize(hvd.broadcast_async(tensor, root_rank, name=name, process_set=set_of(group)))

    def alltoall(
        self, tensor: torch.Tensor, group: Group, name: str = "alltoall", splits: list[int] | None = None
    ) -> torch.Tensor:
        lengths = None if splits is None else torch.tensor(splits, dtype=torch.int32)
        return hvd.synchronize(hvd.alltoall_async(tensor, lengths, name=name, process_set=set_of(group)))[0]

    def reducescatter(
        self, tensor: torch.Tensor, group: Group, op: Op = "average", name: str = "reducescatter"
    ) -> torch.Tensor:
        settings: Any = {"op": self._ops[op], "name": name, "process_set": set_of(group)}
        return hvd.synchronize(hvd.reducescatter_async(tensor, **settings))


def set_of(group: Group) -> Any:
    """The group's process set."""
    return hvd.global_process_set if group.handle is None else group.handle


class Started:
    """A collective that has started (`core.seam.Pending`)."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __call__(self) -> torch.Tensor:
        return hvd.synchronize(self._handle)

    def ready(self) -> bool:
        return bool(hvd.poll(self._handle))


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as it is sent, with all elements; `sparse=True` of an embedding makes one of some rows."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def start_average(tensor: torch.Tensor, group: Group, name: str) -> Started:
    """Start averaging a tensor over a group in place."""
    return Started(hvd.allreduce_async_(tensor, op=hvd.Average, name=name, process_set=set_of(group)))


def start_reducescatter(tensor: torch.Tensor, group: Group, name: str) -> Started:
    """Start averaging a tensor over a group, for this rank's part."""
    return Started(hvd.reducescatter_async(tensor, op=hvd.Average, name=name, process_set=set_of(group)))


def start_allgather(tensor: torch.Tensor, group: Group, out: torch.Tensor, name: str) -> Started:
    """Start gathering tensors of equal shapes into `out`, without the copy that Horovod's `allgather_async` makes."""
    return Started(mpi_ops._allgather_async(tensor, out, name, set_of(group)))


def _may_be_joined(tensors: list[torch.Tensor]) -> bool:
    """Whether tensors are reduced as one: Horovod copies a group's into its buffer and back, and of one that is made of
    them no copy comes back."""
    first = tensors[0]
    return first.device.type == "cpu" and all(tensor.dtype == first.dtype for tensor in tensors)
