"""TensorFlow's rivals: Horovod by hand, MultiWorkerMirroredStrategy, and no communication at all."""

from __future__ import annotations

import json
import os
from typing import Any, cast

import horovod.tensorflow as hvd

from hvdkit.adapters import tensorflow as own
from hvdkit.adapters.tensorflow import Session
from hvdkit.baselines import base
from hvdkit.baselines.base import Apart, Rival
from hvdkit.baselines.rendezvous import free_port
from hvdkit.core import usage
from hvdkit.core.seam import Adapter
from hvdkit.core.topology import Topology, threads_per_rank
from hvdkit.recipe.schema import Loss, Optimizer
from hvdkit.strategies.codecs import cast as compression_

import tensorflow as tf  # isort: skip  # after the adapter, which quiets TensorFlow's banner

Tensors = list[tf.Tensor]


class Plain(Rival):
    """As hvd.DistributedGradientTape does it: a reduction for each gradient."""

    RIVAL = "plain"

    def prepare(
        self, model: tf.Module, optimizer: Optimizer, loss: Loss, compression: str = "none", precision: str = "fp32"
    ) -> Session:
        session = own.prepare(model, optimizer, loss, compression, precision)
        compressor = compression_.make(compression, cast(Adapter, self))

        def average(gradients: Tensors) -> Tensors:
            return [
                hvd.allreduce(
                    gradient, op=hvd.Average, compression=compressor, name=f"gradient.{index}", ignore_name_scope=True
                )
                for index, gradient in enumerate(gradients)
            ]

        session.update.average = average
        return session


class Strategy(Apart):
    """tf.distribute.MultiWorkerMirroredStrategy in a custom loop: `strategy.run`, gradients by `all_reduce` in it.

    One replica a process, so the network's variables need not be mirrored. TensorFlow chooses how to communicate.
    """

    RIVAL = "multiworker"

    def __init__(self, adapter: Any) -> None:
        super().__init__(adapter)
        self.strategy: tf.distribute.Strategy

    def connect(self, topology: Topology) -> None:
        workers = [f"127.0.0.1:{int(port)}" for port in self.meeting.exchange(str(free_port()).encode())]
        task = {"type": "worker", "index": topology.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})

    def init(self, device: str, threads: int | None = None) -> Topology:
        topology = super().init(device, threads)
        # The strategy starts TensorFlow's threads, which others start behind `init`.
        usage.pin_where_asked(topology.local_rank, topology.local_size, threads_per_rank(threads, topology.local_size))
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy()
        return topology

    def synchronize(self) -> None:
        """By fetching a value that the device makes last; TensorFlow's own function does not work in a cluster."""
        tf.zeros([]).numpy()

    @staticmethod
    def average(gradients: Tensors) -> Tensors:
        """Inside of `strategy.run`."""
        return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradients))


class MultiWorker(Strategy):
    """The network of plain TensorFlow by the strategy."""

    def prepare(
        self, model: tf.Module, optimizer: Optimizer, loss: Loss, compression: str = "none", precision: str = "fp32"
    ) -> Session:
        session = own.prepare(model, optimizer, loss, compression, precision)
        session.update.average = self.average
        step, probe = session.step, session.probe

        @tf.function
        def run_step(images: tf.Tensor, labels: tf.Tensor, in_parts: bool) -> tf.Tensor:
            return self.strategy.run(step, args=(images, labels, in_parts))

        @tf.function
        def run_probe(images: tf.Tensor, labels: tf.Tensor) -> tuple[Any, ...]:
            return cast(tuple[Any, ...], self.strategy.run(probe, args=(images, labels)))

        session.step, session.probe = run_step, run_probe
        return session


class Independent(base.Independent):
    """Gradients stay where they are."""

    def prepare(
        self, model: tf.Module, optimizer: Optimizer, loss: Loss, compression: str = "none", precision: str = "fp32"
    ) -> Session:
        session = own.prepare(model, optimizer, loss, compression, precision)
        session.update.average = lambda gradients: gradients
        return session


RIVALS = {"plain": Plain, "multiworker": MultiWorker, "independent": Independent}
