"""Tensor parallelism in PyTorch: both functions of Megatron-LM, and cross-entropy of divided outputs.

Shoeybi et al. 2019, section 3. Gradients of Horovod's own functions do not serve: that of a sum is a sum again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from hvdkit.core.group import Group
from hvdkit.core.seam import Adapter


class _Sum(torch.autograd.Function):
    """The sum over ranks, whose gradient is the identity (g); or the other way round (f)."""

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, sum_over_ranks: Callable[[torch.Tensor], torch.Tensor], here: bool
    ) -> Any:
        context.sum_over_ranks, context.here = sum_over_ranks, here
        return sum_over_ranks(x) if here else x.view_as(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        return gradient if context.here else context.sum_over_ranks(gradient), None, None


def use(adapter: Adapter, tensor: torch.Tensor, group: Group, name: str, forward: bool) -> torch.Tensor:
    """As `Adapter.leave_parts` with `forward`, else as `enter_parts`."""
    used: torch.Tensor = _Sum.apply(tensor, partial(_sum, adapter, group, name), forward)
    return used


def _sum(adapter: Adapter, group: Group, name: str, tensor: torch.Tensor) -> torch.Tensor:
    # detached and contiguous, as Horovod wants it: images as they are in memory
    order, back = ((0, 2, 3, 1), (0, 3, 1, 2)) if tensor.ndim == 4 else (range(tensor.ndim),) * 2
    (total,) = adapter.allreduce([tensor.detach().permute(*order).contiguous()], group, "sum", name)
    summed: torch.Tensor = total.permute(*back)
    return summed


class DividedOutputs:
    """Outputs (…, classes) of which each rank of a group has those from class `start` on; labels are the whole's."""

    def __init__(self, adapter: Adapter, group: Group, start: int, classes: int) -> None:
        self._adapter, self._group, self._start, self._classes = adapter, group, start, classes

    def cross_entropy(
        self, logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0, reduction: str = "mean"
    ) -> torch.Tensor:
        """As `torch.nn.functional.cross_entropy` has it, the same on all ranks; collective.

        The largest logit, which keeps exponentials finite, and three sums over the classes come from all ranks.
        """
        rows, own = logits.flatten(0, -2), labels.flatten() - self._start
        here = (own >= 0) & (own < rows.shape[1])
        (top,) = self._adapter.allreduce([rows.detach().amax(1)], self._group, "max", "tensor.loss.largest")
        rows = rows - top[:, None]
        picked = rows.gather(1, own.where(here, 0)[:, None])[:, 0] * here
        sums = torch.stack([rows.exp().sum(1), picked, rows.sum(1)])
        total, label, every = self._adapter.leave_parts(sums, self._group, "tensor.loss.sums")
        losses = total.log() - (1 - label_smoothing) * label - label_smoothing / self._classes * every
        return losses if reduction == "none" else losses.mean()

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """The outputs of all ranks; collective."""
        rows = logits.flatten(0, -2).T.contiguous()
        every = self._adapter.allgather(rows, self._group, "tensor.outputs")
        return every.T.unflatten(0, logits.shape[:-1])
