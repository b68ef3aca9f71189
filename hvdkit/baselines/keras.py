"""Keras's rivals: Horovod by hand, MultiWorkerMirroredStrategy, and no communication at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from hvdkit.adapters import keras as own
from hvdkit.adapters.keras import Session
from hvdkit.adapters.tensorflow import cross_entropy
from hvdkit.baselines import base
from hvdkit.baselines import tensorflow as tf_rivals
from hvdkit.baselines.base import Rival
from hvdkit.core.trainer import Loop
from hvdkit.data.batches import Batch
from hvdkit.recipe.schema import Loss, Optimizer

import keras  # isort: skip  # after the adapter, which quiets TensorFlow's banner
import tensorflow as tf  # isort: skip


class Plain(Rival):
    """`model.fit` with an optimizer that reduces all gradients as one group.

    There is no other way by hand: Horovod's own Keras front end does not work under Keras 3. So only Horovod's
    settings, which are its defaults here, differ from hvdkit's.
    """

    RIVAL = "plain"

    def fit(self, session: Session, loop: Loop) -> None:
        """As the seam's."""
        own.fit(session, loop)


class MultiWorker(tf_rivals.Strategy):
    """A Keras model trained by a custom loop: `model.fit` does not work under the strategy.

    `fit` says "PerReplica" cannot become a tensor (Keras 3.15).
    """

    def prepare(
        self, model: keras.Model, optimizer: Optimizer, loss: Loss, compression: str = "none", precision: str = "fp32"
    ) -> Session:
        session = own.prepare(model, optimizer, loss, compression, precision)
        update = session.update
        update.average = self.average

        def forward(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            logits = tf.cast(model(images, training=True), session.parameters)
            return logits, cross_entropy(logits, labels, loss.label_smoothing)

        def step(images: tf.Tensor, labels: tf.Tensor, in_parts: bool) -> tf.Tensor:
            _, value, gradients = update.backward(lambda: forward(images, labels))
            update(gradients, in_parts)
            return value

        def probe(images: tf.Tensor, labels: tf.Tensor) -> tuple[Any, ...]:
            return update.probe(update.backward(lambda: forward(images, labels)))

        @tf.function
        def run_step(images: tf.Tensor, labels: tf.Tensor, in_parts: bool) -> tf.Tensor:
            return self.strategy.run(step, args=(images, labels, in_parts))

        @tf.function
        def run_probe(images: tf.Tensor, labels: tf.Tensor) -> tuple[Any, ...]:
            return cast(tuple[Any, ...], self.strategy.run(probe, args=(images, labels)))

        session.step, session.probe = run_step, run_probe
        return session

    def train_step(self, session: Session, batches: Sequence[Batch]) -> np.ndarray:
        (batch,) = batches
        assert session.step is not None
        return np.asarray(session.step(tf.constant(batch.images), tf.constant(batch.labels), False))


class Independent(base.Independent):
    """Gradients stay where they are."""

    def prepare(
        self, model: keras.Model, optimizer: Optimizer, loss: Loss, compression: str = "none", precision: str = "fp32"
    ) -> Session:
        session = own.prepare(model, optimizer, loss, compression, precision)
        session.update.average = lambda gradients: gradients
        return session

    def fit(self, session: Session, loop: Loop) -> None:
        """As the seam's."""
        own.fit(session, loop)


RIVALS = {"plain": Plain, "multiworker": MultiWorker, "independent": Independent}
