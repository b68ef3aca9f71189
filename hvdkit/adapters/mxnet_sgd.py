"""MXNet's optimizer for `hvdkit.adapters.mxnet`: SGD in PyTorch's form, by MXNet's fused kernels."""

from __future__ import annotations

import mxnet as mx
import numpy as np

from hvdkit.config import Optimizer
from hvdkit.core.optimizer import decay_of

_KERNEL_TENSORS = 60  # what one call of MXNet's multi-tensor kernels takes at most


class MomentumSGD(mx.optimizer.Optimizer):
    """`hvdkit.core.optimizer.sgd_step` in place; MXNet's own has the learning rate inside the velocity.

    Gluon hands over up to `aggregate_num` parameters of one dtype at once. One by one, op by op, they would cost as
    much as a tenth of a small network's step.
    """

    def __init__(self, settings: Optimizer) -> None:
        super().__init__(learning_rate=settings.learning_rate)
        self._settings = settings
        self.aggregate_num = _KERNEL_TENSORS
        self._scratch: dict[int, mx.nd.NDArray] = {}

    def create_state(self, index: int, weight: mx.nd.NDArray) -> mx.nd.NDArray:
        """The velocity."""
        return mx.nd.zeros_like(weight)

    def update(
        self,
        index: list[int],
        weight: list[mx.nd.NDArray],
        grad: list[mx.nd.NDArray],
        state: list[mx.nd.NDArray],
    ) -> None:
        """One step of the parameters numbered `index`, whose velocities are `state`."""
        decays = [decay_of(self._settings, one.shape) for one in weight]
        if weight[0].dtype == np.float32:
            self._update_fused(index, weight, grad, state, decays)
        else:  # the kernels' settings are float32: 0.9 is 0.89999998 to them
            for one in zip(weight, grad, state, decays, strict=True):
                self._update_one(*one)

    def _update_fused(
        self,
        index: list[int],
        weights: list[mx.nd.NDArray],
        gradients: list[mx.nd.NDArray],
        velocities: list[mx.nd.NDArray],
        decays: list[float],
    ) -> None:
        count, rate, momentum = len(weights), self.learning_rate, self._settings.momentum
        none, rates = [0.0] * count, [rate] * count
        # velocity = momentum × velocity + gradient + decay × weight: the kernel's own formula at a rate of -1. Its
        # weights, the old plus the velocity, are not wanted.
        scratch = [
            self._scratch.setdefault(number, mx.nd.zeros_like(weight))
            for number, weight in zip(index, weights, strict=True)
        ]
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

    def _update_one(
        self, weight: mx.nd.NDArray, gradient: mx.nd.NDArray, velocity: mx.nd.NDArray, decay: float
    ) -> None:
        if decay:
            gradient = gradient + decay * weight
        velocity *= self._settings.momentum
        velocity += gradient
        step = gradient + self._settings.momentum * velocity if self._settings.nesterov else velocity
        weight -= self.learning_rate * step


def _interleaved(*tensors: list[mx.nd.NDArray]) -> list[mx.nd.NDArray]:
    return [one for group in zip(*tensors, strict=True) for one in group]
