"""Horovod's asynchronous functions for PyTorch, waited for: unlike its others, they record nothing for autograd."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops

from hvdkit.adapters.collectives import HorovodAdapter
from hvdkit.core.group import Group
from hvdkit.core.seam import Pending, Starting


class Started(Pending):
    """A collective that has started."""

    def __init__(self, handle: int) -> None:
        self._handle = handle

    def __call__(self) -> torch.Tensor:
        return hvd.synchronize(self._handle)

    def ready(self) -> bool:
        return bool(hvd.poll(self._handle))


class Message(Started):
    """What one rank of a group sends to the others, in the place of their `tensor`."""

    def __init__(self, handle: int, tensor: torch.Tensor) -> None:
        super().__init__(handle)
        self._tensor = tensor

    def __call__(self) -> torch.Tensor:
        if (got := super().__call__().numel()) != (expected := self._tensor.numel()):
            raise RuntimeError(f"expected a message of {expected} values, got {got}")
        return self._tensor


class TorchCollectives(HorovodAdapter):
    """Collectives that are waited for, and those that have started."""

    horovod, framework = hvd, torch

    def call(self, function: str, *arguments: object, group: Group, **named: object) -> Any:
        end = "_" if function.endswith("_") else ""
        start = getattr(hvd, f"{function.removesuffix('_')}_async{end}")
        return hvd.synchronize(start(*arguments, **named, **self.how(group)))

    def start(
        self, what: Starting, tensor: torch.Tensor, group: Group, name: str, out: torch.Tensor | None = None
    ) -> Pending:
        if group.is_alone:
            return super().start(what, tensor, group, name, out)
        if what == "allgather":  # without the copy that Horovod's `allgather_async` makes
            return Started(mpi_ops._allgather_async(tensor, out, name, *self.how(group).values()))
        start = hvd.allreduce_async_ if what == "average" else hvd.reducescatter_async
        return Started(start(tensor, op=hvd.Average, name=name, **self.how(group)))

    def start_broadcast(self, tensor: torch.Tensor, group: Group, root_rank: int, name: str) -> Pending:
        # Horovod asks rank 0 about each broadcast, but keeps what was agreed on an allgather: here, of one rank's.
        own = tensor.view(-1)
        sent = own if group.ranks[group.index] == root_rank else own[:0]
        return Message(mpi_ops._allgather_async(sent, own, name, *self.how(group).values()), tensor)


def dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as it is sent, with all elements; `sparse=True` of an embedding makes one of some rows."""
    return gradient.to_dense() if gradient.is_sparse else gradient
