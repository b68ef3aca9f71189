"""`torch.distributed.pipelining`: PyTorch's own schedules of a pipeline, on the stages that hvdkit makes of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from hvdkit.adapters.pytorch.training import TrainableModel
from hvdkit.baselines.pytorch.by_hand import ByHandSession, TorchOptim
from hvdkit.baselines.pytorch.meshed import Meshed
from hvdkit.core.group import Mesh
from hvdkit.core.pieces import Partition, sum_of_squares
from hvdkit.core.session import Gradients
from hvdkit.core.stateful import Stateful
from hvdkit.core.strategy import Strategy
from hvdkit.data.dataset import Batch
from hvdkit.recipe.parallel import microbatches_of
from hvdkit.recipe.schema import Optimizer, Recipe

_SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class _Module(torch.nn.Module):
    """A stage's forward pass as hvdkit has it, in training mode."""

    def __init__(self, trainable: TrainableModel) -> None:
        super().__init__()
        self.model, self._outputs_of = trainable.model, trainable.outputs_of

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._outputs_of(inputs)


class _Timed(PipelineStage):
    """Adds up the seconds of its passes, and of the loss."""

    seconds = 0.0

    def forward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        return self.timed(super().forward_one_chunk, *arguments, **named)

    def backward_one_chunk(self, *arguments: Any, **named: Any) -> Any:
        return self.timed(super().backward_one_chunk, *arguments, **named)

    def timed(self, run: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        began = perf_counter()
        result = run(*arguments, **named)
        self.seconds += perf_counter() - began
        return result


class _Stages(TorchOptim):
    """Runs a schedule. Gradients are then averaged over the data axis, as one vector.

    A table that is the first layer and the last has a gradient at both ends, which are added up.
    """

    def __init__(self, mesh: Mesh, schedule: str, microbatches: int) -> None:
        super().__init__(mesh.data)
        self._mesh, self._kind, self._microbatches = mesh, _SCHEDULES[schedule], microbatches
        self._schedules: dict[int, ScheduleGPipe | Schedule1F1B] = {}  # by the number of microbatches

    def bind(self, session: Stateful) -> None:
        super().bind(session)
        pipeline, module, device = self._mesh.pipeline, _Module(self.trainable), self.trainable.device
        self.stage = _Timed(module, pipeline.index, pipeline.size, device, group=pipeline.handle)

    def partition(self, settings: Optimizer) -> Partition:
        held = super().partition(settings)
        self._shared = held.shared
        return held

    def run(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        """Gradients of the mean loss of the batches, which is returned on the last stage; None on the others."""
        is_first, is_last = self._mesh.before is None, self._mesh.after is None
        parts = len(batches) * self._microbatches
        if parts not in self._schedules:
            self._schedules[parts] = self._kind(self.stage, parts, partial(self.stage.timed, self.trainable.criterion))
        for parameter in self.trainable.trained.values():
            parameter.grad = None
        inputs, targets = (torch.cat(tensors) for tensors in zip(*map(self.trainable.inputs, batches), strict=True))
        losses: list[torch.Tensor] = []
        self._schedules[parts].step(
            *([inputs] if is_first else ()), target=targets if is_last else None, losses=losses, return_outputs=False
        )
        for name in self._shared:
            assert self._mesh.ends
            dist.all_reduce(self.trainable.trained[name].grad, group=self._mesh.ends.handle)
        return torch.stack(losses).detach().mean() if is_last else None

    def wait(self) -> None:
        if self.group.size == 1:
            return
        gradients = list(self.trainable.gradients().values())
        vector = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(vector, group=self.group.handle)
        vector /= self.group.size
        for gradient, mean in zip(gradients, vector.split([tensor.numel() for tensor in gradients]), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def _total(self, session: ByHandSession, norms: list[torch.Tensor]) -> torch.Tensor:
        """Over all stages; what both ends have counts on the first."""
        named = zip(session.trainable.gradients(), norms, strict=True)
        counted = [norm for name, norm in named if self._mesh.before is None or name not in self._shared]
        total = sum_of_squares(session.adapter, counted)
        dist.all_reduce(total, group=self._mesh.pipeline.handle)
        return total


class _Session(ByHandSession):
    strategy: _Stages

    def train_step(self, batches: Sequence[Batch]) -> torch.Tensor | None:
        assert self.pipeline
        before = self.strategy.stage.seconds
        loss = self.strategy.run(batches)
        self.pipeline.busy.append(self.strategy.stage.seconds - before)
        self.strategy.wait()
        self.strategy.step(self)
        return loss

    def gradients(self, batch: Batch) -> Gradients:
        assert self.pipeline
        loss = self.strategy.run([batch])
        (mean,) = self.pipeline.from_last([0.0 if loss is None else float(loss)])
        own = self._whole()
        self.strategy.wait()
        return Gradients(np.zeros(0), mean, own, self._whole())

    def _whole(self) -> dict[str, np.ndarray]:
        return self.arrays(dict(self.update.partition.gather(self.trainable.gradients())))


class Pipelining(Meshed):
    """The recipe's stages and microbatches, by PyTorch's schedule of the recipe's name."""

    session_class = _Session

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        axes = recipe.parallel
        return _Stages(mesh, axes.schedule, microbatches_of(axes, recipe.batch_size))
