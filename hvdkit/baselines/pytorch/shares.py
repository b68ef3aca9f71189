"""What the baselines share whose ranks hold shares of the parameters: tensors that are gathered when they are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hvdkit.baselines.pytorch.sessions import ByHandSession
from hvdkit.core.group import Group
from hvdkit.core.pieces import Partition
from hvdkit.core.session import Gradients
from hvdkit.data.dataset import Batch


class Share(ABC):
    """A tensor of which this rank holds a share of `nbytes`. `shape` and `dtype` are those of the whole.

    It has as much of `torch.Tensor` as reading and setting a state needs; all ranks read it together.
    """

    shape: torch.Size
    dtype: torch.dtype
    nbytes: int

    @abstractmethod
    def detach(self) -> torch.Tensor:
        """The whole tensor; collective."""

    @abstractmethod
    def copy_(self, whole: torch.Tensor) -> None:
        """Set this rank's share from the whole tensor, which every rank has."""


class Slots(Partition):
    """Each rank has a share of every parameter, and of every slot of its optimizer, which updates them itself."""

    by_kernel = False

    @property
    def groups(self) -> tuple[Group, ...]:
        return (Group(tuple(range(dist.get_world_size())), dist.get_rank()),)

    def _gathered(self, key: str, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {key: tensors[key].detach()}


class SharesSession(ByHandSession):
    """A session whose parameters and slots are `Share`s."""

    def gradients(self, batch: Batch) -> Gradients:
        """Own gradients by one pass for each rank, in which the other ranks' losses count nothing; then averaged ones.

        Nothing else shows a rank's own gradients, as backward reduces them.
        """
        size, buffers = dist.get_world_size(), self.trainable.buffers.values()
        statistics = [buffer.clone() for buffer in buffers]
        mine: dict[str, np.ndarray] = {}
        for rank in range(size):
            reduced = self._reduced(batch, float(size) if rank == dist.get_rank() else 0.0)
            arrays = self._arrays(reduced[2])  # gathered on all ranks, kept on one
            mine = arrays if rank == dist.get_rank() else mine
            for buffer, before in zip(buffers, statistics, strict=True):
                buffer.copy_(before)  # the next pass must not update them again
        logits, loss, averaged = self._reduced(batch, 1.0)
        return Gradients(self.adapter.to_numpy(logits), float(loss), mine, self._arrays(averaged))

    def _reduced(self, batch: Batch, weight: float) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        """Outputs, loss, and the mean over all ranks of the gradients of the weighted loss."""
        raise NotImplementedError

    def _bytes_of(self, tensors: Mapping[str, Any]) -> int:
        return sum(tensor.nbytes for tensor in tensors.values())
