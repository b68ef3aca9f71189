"""What the baselines share whose ranks divide the model: collectives over the groups of a mesh, by PyTorch's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvdkit.baselines.pytorch.by_hand import ProcessGroup
from hvdkit.core.group import Group, Ranks, Topology
from hvdkit.core.seam import Op, Pending

_SUMMED = ("sum", "average")


class Meshed(ProcessGroup):
    """PyTorch's process groups, one for each group of the mesh that has some of the ranks."""

    def init(self, device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
        topology = super().init(device, threads, sets)
        self._groups = {ranks: dist.new_group(list(ranks)) for ranks in sets}
        return topology

    def process_set(self, ranks: Ranks) -> dist.ProcessGroup:
        return self._groups[ranks]

    def allreduce(
        self,
        tensors: list[torch.Tensor],
        group: Group,
        op: Op = "average",
        name: str = "allreduce",
        overwrite: bool = False,
    ) -> list[torch.Tensor]:
        reduced = [tensor if overwrite else tensor.clone() for tensor in tensors]
        if group.size > 1:
            kind = dist.ReduceOp.SUM if op in _SUMMED else getattr(dist.ReduceOp, op.upper())
            for tensor in reduced:
                dist.all_reduce(tensor, kind, group.handle)
        return [tensor / group.size for tensor in reduced] if op == "average" else reduced

    def allgather(self, tensor: torch.Tensor, group: Group, name: str = "allgather") -> torch.Tensor:
        return torch.cat(self.allgather_object(tensor, group))

    def broadcast(self, tensor: torch.Tensor, group: Group, root_rank: int, name: str = "broadcast") -> torch.Tensor:
        sent = tensor.clone()
        if group.size > 1:
            dist.broadcast(sent, root_rank, group.handle)
        return sent

    def start_broadcast(self, tensor: torch.Tensor, group: Group, root_rank: int, name: str) -> Pending:
        return Pending(self.broadcast(tensor, group, root_rank, name))

    def allgather_object(self, value: Any, group: Group, name: str = "allgather_object") -> list[Any]:
        everyone = [value] * group.size
        if group.size > 1:
            dist.all_gather_object(everyone, value, group.handle)
        return everyone
