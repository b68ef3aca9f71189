"""Optimizers for `hvdkit.adapters.mxnet`: MXNet's fused kernels where they compute what core's rules say."""

from __future__ import annotations

import mxnet as mx
import numpy as np

from hvdkit.core import update_rules as rules
from hvdkit.core.tensors import Tensors
from hvdkit.recipe.schema import Optimizer, Sgd

_KERNEL_TENSORS = 60  # what one call of MXNet's multi-tensor kernels takes at most


class Updater:
    """Updates parameters in place by core's rule for `settings`.

    Operation by operation, a small network's update would cost as much as a tenth of its step. So SGD, which most
    recipes use, goes through MXNet's multi-tensor kernels. They know float32 only: 0.9 is 0.89999998 to them.
    """

    def __init__(self, settings: Optimizer, parameters: list[mx.gluon.Parameter], ops: Tensors) -> None:
        self.rate = settings.learning_rate
        self.steps = 0  # updates made
        self._settings, self._parameters, self._ops = settings, parameters, ops
        count = len(rules.slot_names(settings))
        self._slots = {id(one): tuple(mx.nd.zeros_like(one.data()) for _ in range(count)) for one in parameters}
        decoupled = isinstance(settings, Sgd) and settings.decoupled and settings.weight_decay > 0
        single = all(np.dtype(one.dtype) == np.float32 for one in parameters)
        self._fused = FusedSgd(settings) if isinstance(settings, Sgd) and single and not decoupled else None

    def slots(self, parameter: mx.gluon.Parameter) -> tuple[mx.nd.NDArray, ...]:
        """The parameter's slots in the order of `rules.slot_names`; zero until the first update."""
        return self._slots[id(parameter)]

    def update(self, gradients: list[mx.nd.NDArray]) -> None:
        """One update; `gradients` are in the order of the parameters."""
        self.steps += 1
        weights = [parameter.data() for parameter in self._parameters]
        slots = [self.slots(parameter) for parameter in self._parameters]
        if self._fused:
            self._fused.update(weights, gradients, [velocity for (velocity,) in slots], self.rate)
            return
        corrections = rules.bias_corrections(self._settings, self.steps)
        for weight, gradient, old in zip(weights, gradients, slots, strict=True):
            updated, new = rules.update(self._settings, self._ops, weight, gradient, old, self.rate, corrections)
            updated.copyto(weight)
            for slot, value in zip(old, new, strict=True):
                value.copyto(slot)


class FusedSgd:
    """Core's rule for SGD with coupled decay in float32; MXNet's own has the learning rate inside the velocity."""

    def __init__(self, settings: Sgd) -> None:
        self._settings = settings
        self._scratch: list[mx.nd.NDArray] = []

    def update(
        self,
        weights: list[mx.nd.NDArray],
        gradients: list[mx.nd.NDArray],
        velocities: list[mx.nd.NDArray],
        rate: float,
    ) -> None:
        """One update in place of weights and velocities, which are the same tensors at each call."""
        if not self._scratch:
            self._scratch = [mx.nd.zeros_like(weight) for weight in weights]
        for start in range(0, len(weights), _KERNEL_TENSORS):
            part = slice(start, start + _KERNEL_TENSORS)
            self._update(weights[part], gradients[part], velocities[part], self._scratch[part], rate)

    def _update(
        self,
        weights: list[mx.nd.NDArray],
        gradients: list[mx.nd.NDArray],
        velocities: list[mx.nd.NDArray],
        scratch: list[mx.nd.NDArray],
        rate: float,
    ) -> None:
        count, momentum = len(weights), self._settings.momentum
        decays = [rules.decay_of(self._settings, weight.shape) for weight in weights]
        none, rates = [0.0] * count, [rate] * count
        # velocity = momentum × velocity + gradient + decay × weight: the kernel's own formula at a rate of -1. Its
        # weights, the old plus the velocity, are not wanted.
        mx.nd.multi_sgd_mom_update(
            *_interleaved(weights, gradients, velocities),
            lrs=[-1.0] * count, wds=decays, momentum=momentum, num_weights=count, out=scratch,
        )  # fmt: skip
        if self._settings.nesterov:
            mx.nd.multi_sgd_update(
                *_interleaved(weights, gradients), lrs=rates, wds=decays, num_weights=count, out=weights
            )
            rates = [rate * momentum] * count
        mx.nd.multi_sgd_update(*_interleaved(weights, velocities), lrs=rates, wds=none, num_weights=count, out=weights)


def _interleaved(*tensors: list[mx.nd.NDArray]) -> list[mx.nd.NDArray]:
    return [one for group in zip(*tensors, strict=True) for one in group]
