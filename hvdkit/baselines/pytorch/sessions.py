"""What PyTorch's baselines share: a usual script's model and training step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from hvdkit.adapters.pytorch import PyTorch
from hvdkit.adapters.pytorch.training import TrainableModel
from hvdkit.core import seam
from hvdkit.core.group import Group
from hvdkit.core.pieces import sum_of_squares
from hvdkit.core.seam import AnyLoss
from hvdkit.core.session import Gradients, Session
from hvdkit.core.strategy import Strategy
from hvdkit.core.update_rules import clip, decay_of
from hvdkit.data.dataset import Batch
from hvdkit.recipe.schema import AdamW, Optimizer, Sgd
from hvdkit.strategies.dense import GRADIENTS, mean_count


class ByHand(PyTorch):
    """Shared by the baselines: PyTorch's default layout of images, as in usual scripts."""

    def bind(self, model: torch.nn.Module, loss: AnyLoss, precision: str) -> TrainableModel:
        return TrainableModel(model, loss, precision, self.device, torch.contiguous_format)


class OverAll(Strategy):
    """Of a session that averages gradients itself: counts are averaged over the same ranks."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def mean_count(self, session: seam.SessionView, count: torch.Tensor) -> torch.Tensor:
        return mean_count(session.adapter, count, self._group, GRADIENTS)


class ByHandSession(Session):
    """A usual script's training step: PyTorch accumulates gradients over the batches; subclasses average them."""

    trainable: TrainableModel

    def train_step(self, batches: Sequence[Batch]) -> torch.Tensor:
        self._begin(len(batches))
        losses = []
        for number, batch in enumerate(batches):
            with nullcontext() if number == len(batches) - 1 else self._without_communication():
                losses.append(self._backward_of(batch, len(batches))[1])
            if self.counting is not None:
                self.counting.add()
        self._synchronize()
        if self._divide(len(batches)):
            self._step()
        loss = torch.stack(losses).mean()
        return loss if self.counting is None else self.counting.mean(loss)

    def gradients(self, batch: Batch) -> Gradients:
        """Own gradients of a first backward pass without communication, averaged ones of a second pass."""
        statistics = [buffer.clone() for buffer in self.trainable.buffers.values()]
        self._begin(2)
        with self._without_communication():
            logits, loss = self._backward_of(batch, 1)
        self._divide()
        mine = self._arrays(self.update.unscaled(self.trainable.gradients()))
        for buffer, before in zip(self.trainable.buffers.values(), statistics, strict=True):
            buffer.copy_(before)  # the second pass must not update them again
        for parameter in self.trainable.trained.values():
            parameter.grad = None
        self._backward_of(batch, 1)
        self._synchronize()
        self._divide()
        averaged = self._arrays(self.update.unscaled(self.trainable.gradients()))
        loss = loss if self.counting is None else self.counting.mean(loss)
        return Gradients(self.adapter.to_numpy(logits), float(loss), mine, averaged)

    def _divide(self, batches: float | None = None) -> bool:
        """Divide the gradients of sums by the mean count over the data axis; whether there is an update."""
        if self.counting is None or not self.counting.counts:
            return True
        mean = self.counting.taken(partial(self.strategy.mean_count, self), batches)
        self.counting.over_count(self.trainable.gradients(), mean)  # in place
        return bool(mean > 0)

    def _begin(self, parts: int) -> None:
        for parameter in self.trainable.trained.values():
            parameter.grad = None

    def _backward_of(self, batch: Batch, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = self.trainable.inputs(batch)
        logits, loss = self.trainable.loss_of(inputs, targets)
        (loss * (self.step.scale or 1.0) / parts).backward()
        return logits.detach(), loss.detach()

    def _without_communication(self) -> AbstractContextManager[Any]:
        """A context in which backward passes send no gradients."""
        return nullcontext()

    def _synchronize(self) -> None:
        """Wait until all gradients are averaged."""

    def _step(self) -> None:
        self.update(self.trainable.gradients())


class TorchOptimSession(ByHandSession):
    """Uses an optimizer of `torch.optim`, whose state is the session's slots."""

    settings: Optimizer

    def _step_by(self, optimizer: torch.optim.Optimizer, state: dict[torch.Tensor, Any]) -> None:
        """One step. `state` is that of the optimizer which holds the slots."""
        if self.settings.clip_norm is not None:
            clip(self._held_gradients(), self.settings.clip_norm, self.adapter.tensors, self._total)
        for group in optimizer.param_groups:
            group["lr"] = self.update.rate.get()
        steps = self.update.steps.get()
        for name, slots in self.update.slots.items():
            tensors = [self._torch_slot(slot) for slot in slots]
            state[self.trainable.trained[name]] = (
                {"step": torch.tensor(steps), "exp_avg": tensors[0], "exp_avg_sq": tensors[1]}
                if isinstance(self.settings, AdamW)
                else {"momentum_buffer": tensors[0]}
            )
        optimizer.step()
        self.update.steps.set(steps + 1)

    def _total(self, norms: list[torch.Tensor]) -> torch.Tensor:
        """The sum of squares over the whole gradients, from the norms of `_held_gradients`."""
        return sum_of_squares(self.adapter.tensors, norms)

    def _held_gradients(self) -> list[torch.Tensor]:
        """The gradients that this rank holds."""
        return list(self.trainable.gradients().values())

    def _torch_slot(self, slot: Any) -> torch.Tensor:
        """A slot as PyTorch's optimizer has it."""
        tensor: torch.Tensor = slot
        return tensor


def torch_optimizer(
    settings: Optimizer, parameters: list[torch.nn.Parameter]
) -> tuple[type[torch.optim.Optimizer], list[dict[str, Any]], dict[str, Any]] | None:
    """PyTorch's optimizer, if it computes core's update rule: class, groups of parameters, and options.

    Parameters without decay are in a separate group.
    """
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(decay_of(settings, tuple(parameter.shape)), []).append(parameter)
    grouped = [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
    if isinstance(settings, Sgd) and settings.momentum and not settings.decoupled:
        return torch.optim.SGD, grouped, {"lr": 0.0, "momentum": settings.momentum, "nesterov": settings.nesterov}
    if isinstance(settings, AdamW):
        return torch.optim.AdamW, grouped, {
            "lr": 0.0, "betas": (settings.beta1, settings.beta2), "eps": settings.epsilon,
        }  # fmt: skip
    return None
