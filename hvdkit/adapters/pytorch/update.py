"""Optimizers for `hvdkit.adapters.pytorch`: PyTorch's own where it computes what core's rules say, else the rules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hvdkit.core import update_rules as rules
from hvdkit.core.state import slot_name
from hvdkit.core.tensors import Tensors
from hvdkit.recipe.schema import AdamW, Optimizer, Sgd


def make(settings: Optimizer, model: torch.nn.Module, ops: Tensors) -> torch.optim.Optimizer:
    """The optimizer of all the model's parameters; those that decay spares are in a group of their own."""
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(rules.decay_of(settings, tuple(parameter.shape)), []).append(parameter)
    grouped = [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()]
    rate = settings.learning_rate
    if isinstance(settings, Sgd) and settings.momentum and not settings.decoupled:
        return _SGD(grouped, lr=rate, momentum=settings.momentum, nesterov=settings.nesterov)
    if isinstance(settings, AdamW):
        return _AdamW(grouped, lr=rate, betas=(settings.beta1, settings.beta2), eps=settings.epsilon)
    return RuleOptimizer([group | {"lr": rate, "settings": settings, "ops": ops} for group in grouped])


def _unwrapped(method: Any) -> Any:
    """The method as it was before PyTorch's decorators, where it has any."""
    return getattr(method, "__wrapped__", method)


class _Eager(torch.optim.Optimizer):
    """An optimizer without the decorators that keep torch.compile out of it.

    Nobody compiles an update here, and their first call imports torch._dynamo: a second of a rank's start, 80 MiB.
    """

    add_param_group = _unwrapped(torch.optim.Optimizer.add_param_group)
    zero_grad = _unwrapped(torch.optim.Optimizer.zero_grad)


class _SGD(_Eager, torch.optim.SGD):
    step = torch.no_grad()(_unwrapped(torch.optim.SGD.step))


class _AdamW(_Eager, torch.optim.AdamW):
    step = torch.no_grad()(_unwrapped(torch.optim.AdamW.step))


class RuleOptimizer(_Eager):
    """Core's rule for `settings`, operation by operation with `ops`.

    Both stand in the groups: Horovod's DistributedOptimizer makes a new optimizer of this kind from the groups alone.
    """

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update of every parameter that has a gradient. `closure` is not called."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["settings"], group["ops"], group["lr"])

    def _update(self, parameter: torch.nn.Parameter, settings: Optimizer, ops: Tensors, rate: float) -> None:
        state = prepared(self, settings, parameter)
        slots = tuple(state[_key(name)] for name in rules.slot_names(settings))
        state["step"] += 1
        corrections = rules.bias_corrections(settings, state["step"].item())
        weight, new = rules.update(settings, ops, parameter, parameter.grad, slots, rate, corrections)
        parameter.copy_(weight)
        for slot, value in zip(slots, new, strict=True):
            slot.copy_(value)


def prepared(optimizer: Any, settings: Optimizer, parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """A parameter's part of the optimizer's state. PyTorch makes it at the first step; zeros lead to the same one."""
    state: dict[str, torch.Tensor] = optimizer.state[parameter]
    state.setdefault("step", torch.tensor(0.0))
    for name in rules.slot_names(settings):
        if state.get(_key(name)) is None:
            state[_key(name)] = torch.zeros_like(parameter)
    return state


def slots(optimizer: Any, settings: Optimizer, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Canonical name and tensor of every slot."""
    for name, parameter in model.named_parameters():
        state = prepared(optimizer, settings, parameter)
        for slot in rules.slot_names(settings):
            yield slot_name(slot, name), state[_key(slot)]


def steps(optimizer: Any, settings: Optimizer, model: torch.nn.Module) -> list[torch.Tensor]:
    """The counts of updates, one a parameter: float32 without dimensions."""
    return [prepared(optimizer, settings, parameter)["step"] for parameter in model.parameters()]


def _key(slot: str) -> str:
    return "momentum_buffer" if slot == "momentum" else slot
