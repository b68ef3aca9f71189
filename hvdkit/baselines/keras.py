"""Keras's baselines: Horovod by hand, MultiWorkerMirroredStrategy, and no communication."""

from __future__ import annotations

from typing import Any

from hvdkit.adapters.keras import training  # before TensorFlow, as it silences the start-up messages
from hvdkit.baselines import base
from hvdkit.baselines import tensorflow as tf_baselines
from hvdkit.core import trainer
from hvdkit.core.mesh import Mesh
from hvdkit.core.seam import Hooks
from hvdkit.core.strategy import Strategy
from hvdkit.recipe.schema import Loss, Recipe
from hvdkit.strategies.dense import Dense

import keras  # isort: skip
import tensorflow as tf  # isort: skip


class Plain(base.Baseline):
    """`model.fit` with an optimizer that reduces all gradients as one group.

    There is no other way to do it by hand, as Horovod's own Keras API does not work with Keras 3. So the only
    difference from hvdkit is that Horovod has its default settings.
    """

    RIVAL = "plain"

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return Dense(self.own, mesh.data.size, half=recipe.compression.method == "fp16")


class _Network(training.Network):
    distribution: tf.distribute.Strategy

    def compile(self, function: Any) -> Any:
        return tf_baselines.compiled_in(self.distribution, function)

    def fit(self, hooks: Hooks) -> None:
        trainer.drive(self.session, hooks)


class MultiWorker(tf_baselines.Distributed):
    """A Keras model trained by a custom loop: `model.fit` does not work under the strategy.

    `fit` fails because a "PerReplica" value cannot be converted to a tensor (Keras 3.15).
    """

    def bind(self, model: keras.Model, loss: Loss, precision: str) -> _Network:
        network = _Network(model, loss, precision)
        network.distribution = self.distribution
        return network


class Independent(base.Independent):
    """Gradients are not averaged."""


RIVALS = {"plain": Plain, "multiworker": MultiWorker, "independent": Independent}
