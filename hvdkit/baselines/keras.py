"""Keras's baselines: Horovod by hand, MultiWorkerMirroredStrategy, and no communication."""

from __future__ import annotations

from hvdkit.adapters.keras import Keras, training  # before TensorFlow, as it silences the start-up messages
from hvdkit.baselines import base
from hvdkit.baselines import tensorflow as tf_baselines
from hvdkit.core.group import Mesh
from hvdkit.core.loop import Loop
from hvdkit.core.strategy import Strategy
from hvdkit.recipe.schema import Recipe
from hvdkit.strategies.dense import Dense


class Plain(base.Baseline, Keras):
    """`model.fit` with an optimizer that reduces all gradients as one group.

    There is no other way to do it by hand, as Horovod's own Keras API does not work with Keras 3. So the only
    difference from hvdkit is that Horovod has its default settings.
    """

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return Dense(self, mesh.data, half=recipe.compression.method == "fp16")


class _ReplicaModel(tf_baselines.InReplica, training.TrainableModel):
    def drive(self, loop: Loop) -> None:
        loop.run()


class MultiWorker(tf_baselines.WithStrategy, Keras):
    """A Keras model trained by a custom loop: `model.fit` does not work under the strategy.

    `fit` fails because a "PerReplica" value cannot be converted to a tensor (Keras 3.15).
    """

    model_class = _ReplicaModel


class Independent(base.Independent, Keras):
    """Gradients are not averaged."""


RIVALS = {"plain": Plain, "multiworker": MultiWorker, "independent": Independent}
