"""What `hvdkit.adapters.keras` has Keras compile a model with: they leave the work to a `DistributedUpdate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hvdkit.adapters.tensorflow import cross_entropy
from hvdkit.adapters.tensorflow.update import DistributedUpdate
from hvdkit.core import trace_events
from hvdkit.errors import RequestError

import keras  # isort: skip  # after the other adapter, which sets TensorFlow's log level
import tensorflow as tf  # isort: skip


class DistributedOptimizer(keras.optimizers.Optimizer):
    """Hands Keras's gradients to a `DistributedUpdate`, which has a learning rate in common with it."""

    def __init__(self, learning_rate: float) -> None:
        with floatx("float64"):  # of the learning rate
            super().__init__(learning_rate=learning_rate, name="distributed")
        self.in_parts = False
        self.update: DistributedUpdate

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """Keras derives gradients from this, and reports what it was before."""
        return self.update.scaled(loss)

    def apply(self, grads: list[Any], trainable_variables: list[keras.Variable] | None = None) -> None:
        """Take one batch's gradients. `iterations` counts batches, whether each makes an update or not.

        Raises RequestError where other variables learn than those it was built with.
        """
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if [id(variable) for variable in variables] != [id(variable) for variable in self._trainable_variables]:
            raise RequestError("network: other variables learn than when it was prepared; prepare it again")
        self.update(grads, self.in_parts)
        for variable in variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))
        self.iterations.assign_add(1)


class CrossEntropy(keras.losses.Loss):
    """The loss in the parameters' dtype. Keras hands over labels in it too; it holds class numbers exactly."""

    def __init__(self, label_smoothing: float, dtype: str, update: DistributedUpdate) -> None:
        super().__init__(name="cross_entropy", dtype=dtype)
        self._label_smoothing, self._update = label_smoothing, update

    def call(self, labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        """The batch's mean; `labels` (n,), `logits` (n, classes)."""
        (logits,) = self._update.stamp((trace_events.FORWARD,), [logits])
        return cross_entropy(logits, tf.cast(labels, tf.int64), self._label_smoothing)


@contextmanager
def floatx(dtype: str) -> Iterator[None]:
    """Keras's default dtype, for objects of Keras that do not ask for theirs."""
    before = keras.config.floatx()
    keras.config.set_floatx(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before)
