"""The update of weights by averaged gradients: unscale, clip, apply the optimizer's rule, adjust the loss scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING

from hvdkit.core.pieces import Partition, StateEntry
from hvdkit.core.precision import LOSS_SCALING, PRECISIONS
from hvdkit.core.state import slot_name
from hvdkit.core.tensors import Scalar, Tensor, scalar
from hvdkit.core.update_rules import all_finite, clip, rule_of

if TYPE_CHECKING:
    from hvdkit.core.averaged_weights import WeightAverage
    from hvdkit.core.seam import Adapter
    from hvdkit.core.tensors import Number
    from hvdkit.core.trainable import Trainable
    from hvdkit.recipe.schema import Optimizer


class Update:
    """An optimizer of this rank's pieces of a model's parameters, by a `partition`, with its slots and counters.

    `rule` is that of the `settings`, `kernel` the framework's own for it. `slots` maps the pieces to tensors in the
    order of `Rule.slots`, initially zero. `rate` is the learning rate of the next update, `scale` the loss scale (None
    if the precision needs none). `weight_average` is their EMA or SWA, if there is one.
    """

    def __init__(
        self, adapter: Adapter, trainable: Trainable, settings: Optimizer, precision: str, partition: Partition
    ) -> None:
        self._adapter, self.partition = adapter, partition
        self.settings, self.rule = settings, rule_of(settings)(settings, adapter)
        by_slot = [partition.variables() for _ in self.rule.slots]
        self.slots = {name: tuple(slot[name] for slot in by_slot) for name in partition.pieces}
        self._shapes = [piece.whole_shape for piece in partition.pieces.values()]
        self.rate, self.steps = adapter.number(settings.learning_rate), adapter.number(0.0)
        scales = PRECISIONS[precision].scales_loss
        self.scale: Number | None = adapter.number(LOSS_SCALING.initial) if scales else None
        self.good_steps = adapter.number(0.0)
        self.weight_average: WeightAverage | None = None
        self._constrain = trainable.constrain
        self.kernel = None
        if partition.by_kernel:
            like = [slots[0] for slots in self.slots.values()]
            self.kernel = trainable.update_kernel(settings, self._shapes, like)

    def __call__(self, gradients: Mapping[str, Tensor]) -> None:
        """Update by each piece's averaged gradient of the scaled loss. On an overflow all ranks skip the update."""
        unscaled = self.unscaled(gradients)
        own = [unscaled[name] for name in self.partition.pieces]
        if self.scale is None:
            self._apply(own)
            return
        finite = all_finite(own, self._adapter, self.partition.sum_of_squares)
        self._adapter.when(finite, lambda: self._apply_and_grow(own), lambda: self._rescale(LOSS_SCALING.backoff))

    def unscaled(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The gradients divided by the loss scale."""
        if self.scale is None:
            return dict(gradients)
        scale = self.scale.get()
        return {name: gradient / scalar(self._adapter, scale, gradient) for name, gradient in gradients.items()}

    def _apply_and_grow(self, gradients: list[Tensor]) -> None:
        self._apply(gradients)
        good = self.good_steps.get() + 1
        grow = partial(self._rescale, LOSS_SCALING.growth)
        self._adapter.when(good >= LOSS_SCALING.interval, grow, lambda: self.good_steps.set(good))

    def _rescale(self, factor: float) -> None:
        assert self.scale is not None
        self.scale.set(self.scale.get() * factor)
        self.good_steps.set(0.0)

    def _apply(self, gradients: list[Tensor]) -> None:
        self._clip_and_step(gradients)
        self._constrain()
        if self.weight_average is not None and self.weight_average.settings.decay is not None:
            self.weight_average.add()

    def count_step(self) -> tuple[Scalar, Scalar]:
        """Count an update; returns its bias corrections."""
        if not self.rule.counts_steps:
            return 1.0, 1.0
        self.steps.set(self.steps.get() + 1)
        return self.rule.bias_corrections(self.steps.get())

    def _clip_and_step(self, gradients: list[Tensor]) -> None:
        ops, settings = self._adapter, self.settings
        if settings.clip_norm is not None:
            gradients = clip(gradients, settings.clip_norm, ops, self.partition.sum_of_squares)
        corrections = self.count_step()
        rate, weights, slots = self.rate.get(), self.partition.weights(), list(self.slots.values())
        if self.kernel is not None:
            self.partition.distribute(self.kernel(weights, gradients, slots, rate, corrections))
            return
        first, second = (scalar(self._adapter, correction, gradients[0]) for correction in corrections)
        rate, norms = scalar(self._adapter, rate, gradients[0]), self.partition.norms
        updated = self.rule.updates(self._shapes, weights, gradients, slots, rate, (first, second), norms)
        self.partition.store(self._with_slots_set(updated))

    def _with_slots_set(self, updated: Iterable[tuple[Tensor, tuple[Tensor, ...]]]) -> Iterator[Tensor]:
        """The new weights of each piece, whose new slots are set."""
        for old, (weight, values) in zip(self.slots.values(), updated, strict=True):
            for slot, value in zip(old, values, strict=True):
                self._adapter.assign(slot, value)
            yield weight

    def slot_entries(self) -> list[StateEntry]:
        """The slots, each as an entry of a state."""
        return [
            StateEntry(
                self.partition, {piece: slots[number] for piece, slots in self.slots.items()}, slot_name(slot, "")
            )
            for number, slot in enumerate(self.rule.slots)
        ]

    def entries(self) -> list[StateEntry]:
        """The slots and the average, as entries of a state."""
        return [*self.slot_entries(), *(self.weight_average.entries() if self.weight_average is not None else ())]

    def numbers(self) -> dict[str, tuple[Number, str]]:
        """The optimizer's scalars in a state, with their dtypes there."""
        numbers: dict[str, tuple[Number, str]] = {}
        if self.rule.counts_steps:
            numbers["optimizer.step"] = self.steps, "int64"
        if self.weight_average is not None:
            numbers["optimizer.averaged"] = self.weight_average.count, "int64"
        if self.scale is not None:
            numbers |= {
                "optimizer.loss_scale": (self.scale, "float64"),
                "optimizer.good_steps": (self.good_steps, "int64"),
            }
        return numbers
