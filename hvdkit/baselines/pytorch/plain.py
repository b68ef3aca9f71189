"""Horovod by hand, and no communication at all."""

from __future__ import annotations

import horovod.torch as hvd
import torch

from hvdkit.baselines import base
from hvdkit.baselines.pytorch.by_hand import ByHand, ByHandSession, TorchOptim, torch_optimizer
from hvdkit.core.group import Group, Mesh
from hvdkit.core.pieces import Partition
from hvdkit.core.strategy import Strategy
from hvdkit.recipe.schema import Optimizer, Recipe


class _Horovod(TorchOptim):
    """Uses `torch.optim` if it computes the recipe's update. With `half` gradients are sent in float16."""

    def __init__(self, group: Group, half: bool) -> None:
        super().__init__(group)
        self._compression = hvd.Compression.fp16 if half else hvd.Compression.none

    def partition(self, settings: Optimizer) -> Partition:
        self.settings, named = settings, self.trainable.trained
        plain = torch_optimizer(settings, list(named.values()))
        self._uses_torch_optim = plain is not None
        self._optimizer = hvd.DistributedOptimizer(
            plain or torch.optim.SGD(named.values(), lr=0.0),
            named_parameters=named.items(),
            compression=self._compression,
            op=hvd.Average,
        )
        self._state = self._optimizer.state
        return self.session.held()

    def begin_update(self, batches: int) -> None:
        self._optimizer.set_backward_passes_per_step(batches)

    def wait(self) -> None:
        self._optimizer.synchronize()

    def step(self, session: ByHandSession) -> None:
        # fp16 scales the loss and may skip a step on all ranks, which core does
        if not self._uses_torch_optim or session.update.scale is not None:
            session.update(session.trainable.gradients())
            return
        with self._optimizer.skip_synchronize():
            super().step(session)


class Plain(base.Baseline, ByHand):
    """hvd.DistributedOptimizer around torch.optim: each gradient is sent as soon as it is ready."""

    session_class = ByHandSession

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return _Horovod(mesh.data, recipe.compression.method == "fp16")


class Independent(base.Independent, ByHand):
    """Gradients are not averaged."""
