"""Collectives for `hvdkit.adapters.pytorch`: asked for, and then waited for without taking a core."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import cloudpickle
import horovod.torch as hvd
import torch

from hvdkit.adapters.collectives import Collectives
from hvdkit.core.seam import Op

_POLL_S, _POLL_SHARE = 1e-4, 1 / 1000


class WaitingCollectives(Collectives):
    """As other frameworks', but that the thread which asks sleeps until the result is there."""

    def __init__(self) -> None:
        super().__init__(hvd, lambda splits: torch.tensor(splits, dtype=torch.int32))

    def allreduce(
        self, tensors: list[torch.Tensor], op: Op = "average", name: str = "allreduce", within: Any = None
    ) -> list[torch.Tensor]:
        """As the seam's."""
        group = within or hvd.global_process_set
        handle = hvd.grouped_allreduce_async(tensors, name=name, op=self._ops[op], process_set=group)
        return list(_wait_for_ranks(handle))

    def allgather(self, tensor: torch.Tensor, name: str = "allgather") -> torch.Tensor:
        """As the seam's."""
        return _wait_for_ranks(hvd.allgather_async(tensor, name=name))

    def broadcast(
        self, tensor: torch.Tensor, root_rank: int = 0, name: str = "broadcast", within: Any = None
    ) -> torch.Tensor:
        """As the seam's."""
        group = within or hvd.global_process_set
        return _wait_for_ranks(hvd.broadcast_async(tensor, root_rank, name=name, process_set=group))

    def alltoall(self, tensor: torch.Tensor, name: str = "alltoall", splits: list[int] | None = None) -> torch.Tensor:
        """As the seam's."""
        lengths = None if splits is None else self._counts(splits)
        return _wait_for_ranks(hvd.alltoall_async(tensor, lengths, name=name))[0]

    def reducescatter(self, tensor: torch.Tensor, op: Op = "average", name: str = "reducescatter") -> torch.Tensor:
        """As the seam's."""
        return _wait_for_ranks(hvd.reducescatter_async(tensor, op=self._ops[op], name=name))

    def allgather_object(self, value: Any, name: str = "allgather_object") -> list[Any]:
        """As the seam's, and as Horovod's own but for how it waits."""
        mine = torch.frombuffer(bytearray(cloudpickle.dumps(value)), dtype=torch.uint8)
        sizes = self.allgather(torch.tensor([len(mine)]), name=f"{name}.size")
        everyone = self.allgather(mine, name=f"{name}.bytes")
        return [cloudpickle.loads(each.numpy().tobytes()) for each in everyone.split(sizes.tolist())]


def average_in_place(tensors: list[torch.Tensor], name: str) -> None:
    """Put the means over all ranks in the place of the tensors, which are reduced as one group."""
    _wait_for_ranks(hvd.grouped_allreduce_async_(tensors, op=hvd.Average, name=name))


def broadcast_in_place(named: Mapping[str, torch.Tensor], root_rank: int) -> None:
    """Put the root's tensors in the place of the others', as `hvd.broadcast_parameters` but for how it waits."""
    for handle in [hvd.broadcast_async_(tensor, root_rank, name=name) for name, tensor in named.items()]:
        _wait_for_ranks(handle)


def _wait_for_ranks(
    handle: int,
) -> Any:  # launch/diagnosis/hangs.py knows this name
    """An operation's result. Horovod's own wait never leaves the core, which those threads need that reduce."""
    started = time.perf_counter()
    while not hvd.poll(handle):
        # On a slow network it takes long, and looking takes time from what sends: late by 1/1000 at most.
        time.sleep(max(_POLL_S, _POLL_SHARE * (time.perf_counter() - started)))
    return hvd.synchronize(handle)
