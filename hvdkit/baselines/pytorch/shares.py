"""What the baselines share whose ranks hold shares of the parameters: tensors that are gathered when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor
from typing_extensions import override

from hvdkit.baselines.pytorch.by_hand import ByHandSession, HandWritten
from hvdkit.core.group import Group
from hvdkit.core.pieces import Partition
from hvdkit.core.stateful import Stateful
from hvdkit.data.dataset import Batch

Gather = Callable[[torch.Tensor], torch.Tensor]  # concatenates the shares of a group


@dataclass(frozen=True)
class ShardedTensor:
    """A tensor of which this rank holds a share of `nbytes`, `held`. `shape` and `dtype` are those of the whole.

    It has as much of `torch.Tensor` as reading and setting a state needs: `detach` returns the whole tensor, `copy_`
    sets this rank's share from the whole, which every rank has. All ranks call them together.
    """

    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    detach: Callable[[], torch.Tensor]
    copy_: Callable[[torch.Tensor], None]
    held: Any = None


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def share_of_rows(tensor: torch.Tensor, shape: torch.Size, group: Group, gather: Gather) -> ShardedTensor:
    """A tensor of `shape`, of which FSDP has given each rank of a group some rows, as `torch.chunk` divides it.

    It is gathered by the adapter: `DTensor.full_tensor` has once crashed in a thread of Gloo (PyTorch 2.13).
    """
    held = local(tensor)
    first = -(-shape[0] // group.size) * group.index

    def set_from(whole: torch.Tensor) -> None:
        held.copy_(whole[first : first + len(held)])

    def whole() -> torch.Tensor:
        return held.detach() if group.size == 1 else gather(held.detach())

    return ShardedTensor(shape, tensor.dtype, held.nbytes, whole, set_from, tensor)


class ParameterShares(Partition):
    """Each rank has a share of every parameter, and of every slot of its optimizer, which updates them itself.

    `slots` makes the optimizer's next slot of all parameters.
    """

    by_kernel = False

    def __init__(self, session: Stateful, group: Group, slots: Callable[[], dict[str, ShardedTensor]]) -> None:
        super().__init__(session.adapter, session.trainable.parameters)
        self.pieces = {name: replace(piece, groups=(group,)) for name, piece in self.pieces.items()}
        self._slots = slots

    @override
    def variables(self) -> dict[str, Any]:
        return self._slots()

    @override
    def _gathered(self, key: str, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {key: tensors[key].detach()}


class SharesScript(HandWritten):
    """A script whose parameters and slots are `ShardedTensor`s."""

    @override
    def own(self, session: ByHandSession, batch: Batch) -> dict[str, np.ndarray]:
        """By one pass for each rank, in which the other ranks' losses count nothing.

        Nothing else shows a rank's own gradients, as backward reduces them.
        """
        own: dict[str, np.ndarray] = {}
        for rank in range(self.group.size):
            with session.buffers_kept():
                _, gradients = self.averaged(session, batch, float(self.group.size) * (rank == self.group.index))
            arrays = session.arrays(gradients)  # gathered on all ranks, kept on one
            own = arrays if rank == self.group.index else own
        return own
