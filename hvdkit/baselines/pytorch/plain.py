"""Horovod by hand, and no communication at all."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch

from hvdkit.baselines import base
from hvdkit.baselines.pytorch.sessions import ByHand, OverAll, TorchOptimSession, torch_optimizer
from hvdkit.core.group import Group, Mesh
from hvdkit.core.seam import Adapter
from hvdkit.core.strategy import Strategy
from hvdkit.recipe.schema import Optimizer, Recipe


class _PlainSession(TorchOptimSession):
    """Uses `torch.optim` if it computes the recipe's update."""

    def __init__(self, adapter: Adapter, model: Any, optimizer: Optimizer, *others: Any) -> None:
        super().__init__(adapter, model, optimizer, *others)
        self.settings, named = optimizer, self.trainable.trained
        half = getattr(self.strategy, "half", False)
        chosen = torch_optimizer(optimizer, list(named.values()))
        plain = chosen and chosen[0](chosen[1], **chosen[2])
        # fp16 scales the loss and may skip a step on all ranks, which core does
        self._uses_torch_optim = plain is not None and self.update.scale is None
        self._optimizer = hvd.DistributedOptimizer(
            plain or torch.optim.SGD(named.values(), lr=0.0),
            named_parameters=named.items(),
            compression=hvd.Compression.fp16 if half else hvd.Compression.none,
            op=hvd.Average,
        )

    def _begin(self, parts: int) -> None:
        super()._begin(parts)
        self._optimizer.set_backward_passes_per_step(parts)

    def _synchronize(self) -> None:
        self._optimizer.synchronize()

    def _step(self) -> None:
        if not self._uses_torch_optim:
            super()._step()
            return
        with self._optimizer.skip_synchronize():
            self._step_by(self._optimizer, self._optimizer.state)


class _Half(OverAll):
    """`half` says whether the session sends gradients in float16."""

    def __init__(self, group: Group, half: bool) -> None:
        super().__init__(group)
        self.half = half


class Plain(base.Baseline, ByHand):
    """hvd.DistributedOptimizer around torch.optim: each gradient is sent as soon as it is ready."""

    session_class = _PlainSession

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return _Half(mesh.data, recipe.compression.method == "fp16")


class Independent(base.Independent, ByHand):
    """Gradients are not averaged."""
