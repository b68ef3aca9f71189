"""The update of weights by averaged gradients: unscale, clip, apply the optimizer's rule, count."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hvdkit.core.precision import LOSS_SCALING, PRECISIONS
from hvdkit.core.state import slot_name
from hvdkit.core.update_rules import all_finite, bias_corrections, clip, counts_steps, slot_names, update

if TYPE_CHECKING:
    from hvdkit.core.seam import Adapter, Trainable
    from hvdkit.core.tensors import Number
    from hvdkit.recipe.schema import Optimizer

Tensor = Any


class Update:
    """An optimizer of a model's parameters, with its slots and counters.

    `slots` maps parameters to tensors in the order of `update_rules.slot_names`, initially zero. `rate` is the
    learning rate of the next update, `scale` the loss scale (None if the precision needs none).
    """

    def __init__(self, adapter: Adapter, trainable: Trainable, settings: Optimizer, precision: str) -> None:
        self._adapter, self._settings, self._parameters = adapter, settings, trainable.parameters
        ops = self._ops = adapter.tensors
        self.slots = {
            name: tuple(ops.variable(parameter) for _ in slot_names(settings))
            for name, parameter in self._parameters.items()
        }
        self.rate, self.steps = ops.number(settings.learning_rate), ops.number(0.0)
        scales = PRECISIONS[precision].scales_loss
        self.scale: Number | None = ops.number(LOSS_SCALING.initial) if scales else None
        self.good_steps = ops.number(0.0)
        self._kernel = trainable.update_kernel(settings)

    def __call__(self, gradients: Mapping[str, Tensor]) -> None:
        """Update by averaged gradients of the scaled loss, equal on all ranks: all ranks skip a step or none does."""
        if self.scale is None:
            self._apply(list(gradients.values()))
            return
        unscaled = self.unscaled(gradients)
        finite = all_finite(list(unscaled.values()), self._ops)
        self._ops.when(finite, lambda: self._apply_and_grow(list(unscaled.values())), self._back_off)

    def unscaled(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients divided by the loss scale."""
        if self.scale is None:
            return dict(gradients)
        scale = self.scale.get()
        return {name: gradient / scalar(self._adapter, scale, gradient) for name, gradient in gradients.items()}

    def _apply_and_grow(self, gradients: list[Tensor]) -> None:
        self._apply(gradients)
        good = self.good_steps.get() + 1
        self._ops.when(good >= LOSS_SCALING.interval, self._grow, lambda: self.good_steps.set(good))

    def _grow(self) -> None:
        assert self.scale is not None
        self.scale.set(self.scale.get() * LOSS_SCALING.growth)
        self.good_steps.set(0.0)

    def _back_off(self) -> None:
        assert self.scale is not None
        self.scale.set(self.scale.get() * LOSS_SCALING.backoff)
        self.good_steps.set(0.0)

    def _apply(self, gradients: list[Tensor]) -> None:
        ops, settings = self._ops, self._settings
        if settings.clip_norm is not None:
            gradients = clip(gradients, settings.clip_norm, ops)
        corrections: tuple[Any, Any] = (1.0, 1.0)
        if counts_steps(settings):
            self.steps.set(self.steps.get() + 1)
            corrections = bias_corrections(settings, self.steps.get())
        rate, weights, slots = self.rate.get(), list(self._parameters.values()), list(self.slots.values())
        if self._kernel is not None:
            self._kernel(weights, gradients, slots, rate, corrections)
            return
        for weight, gradient, old in zip(weights, gradients, slots, strict=True):
            first, second = (scalar(self._adapter, each, gradient) for each in corrections)
            own_rate = scalar(self._adapter, rate, gradient)
            new, values = update(settings, ops, weight, gradient, old, own_rate, (first, second))
            ops.assign(weight, new)
            for slot, value in zip(old, values, strict=True):
                ops.assign(slot, value)

    def tensors(self) -> dict[str, Tensor]:
        """The slots, by their names in a state."""
        return {
            slot_name(slot, name): tensor
            for name, held in self.slots.items()
            for slot, tensor in zip(slot_names(self._settings), held, strict=True)
        }

    def numbers(self) -> dict[str, tuple[Number, str]]:
        """The optimizer's scalars in a state, with their dtypes there."""
        found: dict[str, tuple[Number, str]] = {}
        if counts_steps(self._settings):
            found["optimizer.step"] = self.steps, "int64"
        if self.scale is not None:
            found |= {
                "optimizer.loss_scale": (self.scale, "float64"),
                "optimizer.good_steps": (self.good_steps, "int64"),
            }
        return found


def scalar(adapter: Adapter, value: Any, like: Tensor) -> Any:
    """A number, or the value of a `Number`, for arithmetic with `like`: a tensor gets its dtype."""
    return value if isinstance(value, int | float) else adapter.cast(value, adapter.dtype(like))
