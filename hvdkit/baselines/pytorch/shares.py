"""What the baselines share whose ranks hold shares of the parameters: tensors that are gathered when they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from typing_extensions import override

from hvdkit.baselines.pytorch.by_hand import ByHandSession, Script
from hvdkit.core.group import Group
from hvdkit.core.pieces import Partition
from hvdkit.core.stateful import Stateful
from hvdkit.data.dataset import Batch


@dataclass(frozen=True)
class Share:
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


class Shares(Partition):
    """Each rank has a share of every parameter, and of every slot of its optimizer, which updates them itself.

    `slots` makes the optimizer's next slot of all parameters.
    """

    by_kernel = False

    def __init__(self, session: Stateful, group: Group, slots: Callable[[], dict[str, Share]]) -> None:
        super().__init__(session.adapter, session.trainable.parameters)
        self.pieces = {name: replace(piece, groups=(group,)) for name, piece in self.pieces.items()}
        self._slots = slots

    @override
    def variables(self) -> dict[str, Any]:
        return self._slots()

    @override
    def _gathered(self, key: str, tensors: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        return {key: tensors[key].detach()}


class SharesScript(Script):
    """A script whose parameters and slots are `Share`s."""

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
