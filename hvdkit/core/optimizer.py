"""What an optimizer does, as far as it needs no framework."""

from __future__ import annotations

import numpy as np

from hvdkit.config import Optimizer


def decay_of(optimizer: Optimizer, shape: tuple[int, ...]) -> float:
    """The weight decay of a parameter of this shape; `decay: weights` spares vectors: biases and batch norm."""
    return 0.0 if optimizer.decay == "weights" and len(shape) < 2 else optimizer.weight_decay


def sgd_step(
    optimizer: Optimizer, learning_rate: float, weight: np.ndarray, gradient: np.ndarray, velocity: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The reference that every framework must follow: (new weight, new velocity), arrays of one shape.

    Sutskever et al. 2013, section 2, in PyTorch's form: the learning rate is not inside the velocity, so a change of
    rate acts at once.
    """
    gradient = gradient + decay_of(optimizer, weight.shape) * weight
    velocity = optimizer.momentum * velocity + gradient
    update = gradient + optimizer.momentum * velocity if optimizer.nesterov else velocity
    return weight - learning_rate * update, velocity
