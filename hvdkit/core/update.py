"""The update of weights by averaged gradients: unscale, clip, apply the optimizer's rule, adjust the loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hvdkit.core.pieces import Owned
from hvdkit.core.precision import LOSS_SCALING, PRECISIONS
from hvdkit.core.state import has_average, slot_name
from hvdkit.core.tensors import Tensor, scalar
from hvdkit.core.update_rules import all_finite, bias_corrections, clip, counts_steps, slot_names, update_all

if TYPE_CHECKING:
    import numpy as np

    from hvdkit.core.averaging import Average
    from hvdkit.core.seam import Adapter, Trainable
    from hvdkit.core.tensors import Number
    from hvdkit.recipe.schema import Optimizer


class Update:
    """An optimizer of what a rank `owned` of a model's parameters, with its slots and counters.

    `slots` maps the pieces to tensors in the order of `update_rules.slot_names`, initially zero. `rate` is the learning
    rate of the next update, `scale` the loss scale (None if the precision needs none). `average` is that of the
    weights, if there is one.
    """

    def __init__(
        self, adapter: Adapter, trainable: Trainable, settings: Optimizer, precision: str, owned: Owned
    ) -> None:
        self._adapter, self._settings, self.owned = adapter, settings, owned
        ops = self._ops = adapter.tensors
        by_slot = [owned.variables() for _ in slot_names(settings)]
        self.slots = {name: tuple(slot[name] for slot in by_slot) for name in owned.shapes}
        self.rate, self.steps = ops.number(settings.learning_rate), ops.number(0.0)
        scales = PRECISIONS[precision].scales_loss
        self.scale: Number | None = ops.number(LOSS_SCALING.initial) if scales else None
        self.good_steps = ops.number(0.0)
        self.average: Average | None = None
        self._constrain = trainable.constrain
        self._kernel = None
        if owned.by_kernel:
            like = [slots[0] for slots in self.slots.values()]
            self._kernel = trainable.update_kernel(settings, list(owned.shapes.values()), like)

    def __call__(self, gradients: Mapping[str, Tensor]) -> None:
        """Update by averaged gradients of the scaled loss, for each piece: all ranks skip a step or none does."""
        if self.scale is None:
            self._apply(list(gradients.values()))
            return
        unscaled = self.unscaled(gradients)
        finite = all_finite(list(unscaled.values()), self._ops, self.owned.summed)
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
        self._change(gradients)
        self._constrain()
        if self.average is not None and self.average.settings.decay is not None:
            self.average.add()

    def _change(self, gradients: list[Tensor]) -> None:
        ops, settings = self._ops, self._settings
        if settings.clip_norm is not None:
            gradients = clip(gradients, settings.clip_norm, ops, self.owned.summed)
        corrections: tuple[Any, Any] = (1.0, 1.0)
        if counts_steps(settings):
            self.steps.set(self.steps.get() + 1)
            corrections = bias_corrections(settings, self.steps.get())
        rate, weights, slots = self.rate.get(), self.owned.weights(), list(self.slots.values())
        if self._kernel is not None:
            self.owned.stored_in_place(self._kernel(weights, gradients, slots, rate, corrections))
            return
        first, second = (scalar(self._adapter, each, gradients[0]) for each in corrections)
        shapes, rate = list(self.owned.shapes.values()), scalar(self._adapter, rate, gradients[0])
        pieces = update_all(settings, ops, shapes, weights, gradients, slots, rate, (first, second), self.owned.norms)
        self.owned.store(self._with_slots_set(pieces))

    def _with_slots_set(self, pieces: Iterable[tuple[Tensor, tuple[Tensor, ...]]]) -> Iterator[Tensor]:
        """The new weights of each piece, whose new slots are set."""
        for old, (weight, values) in zip(self.slots.values(), pieces, strict=True):
            for slot, value in zip(old, values, strict=True):
                self._ops.assign(slot, value)
            yield weight

    def whole_slots(self) -> Iterator[tuple[str, Tensor]]:
        """The slots of all parameters, with their names in a state, as `Owned.whole` gives them."""
        for number, slot in enumerate(slot_names(self._settings)):
            for name, tensor in self.owned.whole({piece: held[number] for piece, held in self.slots.items()}):
                yield slot_name(slot, name), tensor
        if self.average is not None:
            yield from self.average.tensors()

    def slot_templates(self) -> dict[str, Tensor]:
        """For each name of `whole_slots` a tensor of its shape and dtype: the parameter."""
        parameters = self.owned.parameters.items()
        slots = {slot_name(slot, name): each for slot in slot_names(self._settings) for name, each in parameters}
        return slots | (self.average.layout() if self.average is not None else {})

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set the slots from arrays with the names of `whole_slots`, in the parameters' shapes and dtype."""
        for number, slot in enumerate(slot_names(self._settings)):
            whole = {name: arrays[slot_name(slot, name)] for name in self.owned.parameters}
            for piece, array in self.owned.cut(whole).items():
                self._ops.assign(self.slots[piece][number], self._adapter.from_numpy(array))
        if self.average is not None and has_average(arrays):
            self.average.load(arrays)

    def numbers(self) -> dict[str, tuple[Number, str]]:
        """The optimizer's scalars in a state, with their dtypes there."""
        found: dict[str, tuple[Number, str]] = {}
        if counts_steps(self._settings):
            found["optimizer.step"] = self.steps, "int64"
        if self.average is not None:
            found["optimizer.averaged"] = self.average.count, "int64"
        if self.scale is not None:
            found |= {
                "optimizer.loss_scale": (self.scale, "float64"),
                "optimizer.good_steps": (self.good_steps, "int64"),
            }
        return found
