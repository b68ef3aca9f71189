"""Horovod's asynchronous functions for PyTorch, waited for: unlike its others, they record nothing for autograd."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvdkit.adapters.collectives import HorovodAdapter
from hvdkit.core.group import Group
from hvdkit.core.seam import Op, Pending, Starting


class Started(Pending):
    """A collective that has started."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __call__(self) -> torch.Tensor:
        return hvd.synchronize(self._handle)

    def ready(self) -> bool:
        return bool(hvd.poll(self._handle))


class TorchCollectives(HorovodAdapter):
    """Collectives that are waited for, and those that have started."""

    horovod, framework = hvd, torch

    def allreduce(
        self,
        tensors: list[torch.Tensor],
        group: Group,
        op: Op = "average",
        name: str = "allreduce",
        overwrite: bool = False,
    ) -> list[torch.Tensor]:
        settings: dict[str, Any] = {"name": name, "op": self.op(op), **self.how(group)}
        if len(tensors) == 1:  # without the bookkeeping of a group
            one = hvd.allreduce_async_ if overwrite else hvd.allreduce_async
            return [hvd.synchronize(one(tensors[0], **settings))]
        if not overwrite or not _may_be_joined(tensors):
            several = hvd.grouped_allreduce_async_ if overwrite else hvd.grouped_allreduce_async
            return list(hvd.synchronize(several(tensors, **settings)))
        joined = self.join(tensors)
        hvd.synchronize(hvd.allreduce_async_(joined, **settings))
        return self.part(joined, [tensor.shape for tensor in tensors])

    def allgather(self, tensor: torch.Tensor, group: Group, name: str = "allgather") -> torch.Tensor:
        return hvd.synchronize(hvd.allgather_async(tensor, name=name, **self.how(group)))

    def broadcast(self, tensor: torch.Tensor, group: Group, root_rank: int, name: str = "broadcast") -> torch.Tensor:
        return hvd.synchronize(hvd.broadcast_async(tensor, root_rank, name=name, **self.how(group)))

    def alltoall(
        self, tensor: torch.Tensor, group: Group, name: str = "alltoall", splits: list[int] | None = None
    ) -> torch.Tensor:
        lengths = None if splits is None else torch.tensor(splits, dtype=torch.int32)
        return hvd.synchronize(hvd.alltoall_async(tensor, lengths, name=name, **self.how(group)))[0]

    def reducescatter(
        self, tensor: torch.Tensor, group: Group, op: Op = "average", name: str = "reducescatter"
    ) -> torch.Tensor:
        return hvd.synchronize(hvd.reducescatter_async(tensor, op=self.op(op), name=name, **self.how(group)))

    def start(
        self, what: Starting, tensor: torch.Tensor, group: Group, name: str, out: torch.Tensor | None = None
    ) -> Pending:
        if what == "allgather":  # without the copy that Horovod's `allgather_async` makes
            return Started(mpi_ops._allgather_async(tensor, out, name, *self.how(group).values()))
        start = hvd.allreduce_async_ if what == "average" else hvd.reducescatter_async
        return Started(start(tensor, op=hvd.Average, name=name, **self.how(group)))


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as it is sent, with all elements; `sparse=True` of an embedding makes one of some rows."""
    return gradient.to_dense() if gradient.is_sparse else gradient


def _may_be_joined(tensors: list[torch.Tensor]) -> bool:
    """Whether tensors are reduced as one: Horovod copies a group's into its buffer and back, and of one that is made of
    them no copy comes back."""
    first = tensors[0]
    return first.device.type == "cpu" and all(tensor.dtype == first.dtype for tensor in tensors)
