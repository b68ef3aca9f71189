"""TensorFlow's baselines: Horovod by hand, MultiWorkerMirroredStrategy, and no communication."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd

from hvdkit import usage
from hvdkit.adapters.tensorflow import (
    TensorFlow,  # before TensorFlow, as it silences the start-up messages
    training,  # before TensorFlow, as it silences the start-up messages
)
from hvdkit.baselines import base
from hvdkit.baselines.rendezvous import free_port
from hvdkit.core.group import Group, Mesh, Ranks, Topology, threads_per_rank
from hvdkit.core.seam import AnyLoss, Model
from hvdkit.core.strategy import Strategy
from hvdkit.recipe.schema import Recipe

import tensorflow as tf  # isort: skip


Gradients = dict[str, tf.Tensor]


class OneByOne(Strategy):
    """One allreduce for each gradient."""

    def __init__(self, group: Group, half: bool) -> None:
        self.group = group
        self._compression = hvd.Compression.fp16 if half else hvd.Compression.none

    def average(self, gradients: Gradients) -> Gradients:
        return {
            name: hvd.allreduce(
                gradient,
                op=hvd.Average,
                compression=self._compression,
                name=f"gradient.{index}",
                ignore_name_scope=True,
            )
            for index, (name, gradient) in enumerate(gradients.items())
        }


class Plain(base.Baseline, TensorFlow):
    """Averages gradients like hvd.DistributedGradientTape."""

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return OneByOne(mesh.data, recipe.compression.method == "fp16")


class AllReduceInReplica(Strategy):
    """Averages gradients in the replica context, inside `tf.distribute.Strategy.run`."""

    def average(self, gradients: Gradients) -> Gradients:
        context = tf.distribute.get_replica_context()
        means = context.all_reduce(tf.distribute.ReduceOp.MEAN, list(gradients.values()))
        return dict(zip(gradients, means, strict=True))


class InReplica:
    """A model whose functions are compiled to run in the strategy's replica; each process has one replica."""

    distribution: tf.distribute.Strategy

    def compile(self, function: Callable[..., Any]) -> Any:
        return tf.function(lambda *arguments: self.distribution.run(function, args=arguments), autograph=False)


class _ReplicaModel(InReplica, training.ModuleModel):
    pass


class WithStrategy(base.WithoutHorovod):
    """tf.distribute.MultiWorkerMirroredStrategy in a custom loop: `strategy.run`, gradients by `all_reduce` in it.

    Each process has one replica, so the model's variables need not be mirrored. TensorFlow chooses the communication.
    """

    distribution: tf.distribute.Strategy
    model_class: type[Any]

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        return AllReduceInReplica()

    def connect(self, topology: Topology) -> None:
        workers = [f"127.0.0.1:{int(port)}" for port in self.rendezvous.exchange(str(free_port()).encode())]
        task = {"type": "worker", "index": topology.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})

    def init(self, device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
        topology = super().init(device, threads, sets)
        # The strategy starts TensorFlow's threads here; elsewhere they start after `init`.
        usage.pin_where_asked(topology.local_rank, topology.local_size, threads_per_rank(threads, topology.local_size))
        self.distribution = tf.distribute.MultiWorkerMirroredStrategy()
        return topology

    def bind(self, model: Model, loss: AnyLoss, precision: str) -> Any:
        trainable = self.model_class(model, loss, precision)
        trainable.distribution = self.distribution
        return trainable

    def synchronize(self) -> None:
        """Fetch a value that the device computes last; TensorFlow's own function does not work in a cluster."""
        tf.zeros([]).numpy()


class MultiWorker(WithStrategy, TensorFlow):
    """The strategy for a `tf.Module`."""

    model_class = _ReplicaModel


class Independent(base.Independent, TensorFlow):
    """Gradients are not averaged."""


RIVALS = {"plain": Plain, "multiworker": MultiWorker, "independent": Independent}
