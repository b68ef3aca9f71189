"""The adapter for TensorFlow (`hvdkit/core/seam.py`): plain `tf.Module`s and a compiled step."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdkit.adapters.loading import without

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read on import; keeps start-up messages out of each rank's log
with without("sklearn"):
    import tensorflow as tf

import horovod.tensorflow as hvd

from hvdkit.adapters import capabilities
from hvdkit.adapters.collectives import HorovodAdapter
from hvdkit.adapters.tensorflow import timing, training
from hvdkit.adapters.tensorflow.tensors import TensorFlowTensors
from hvdkit.core.group import Group, Topology, threads_per_rank, wants_gpu
from hvdkit.core.seam import AnyLoss, CountedLoss, Observer, Op
from hvdkit.core.trainable import Trainable
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss

if TYPE_CHECKING:
    from hvdkit.core.batch_statistics import StatisticsOf


class TensorFlow(TensorFlowTensors, HorovodAdapter):
    """TensorFlow, with Horovod."""

    NAME = "tensorflow"
    CAPABILITIES = capabilities.CAPABILITIES[NAME]
    CHOSEN = capabilities.CHOSEN[NAME]
    horovod, framework = hvd, tf

    def bind_device(self, topology: Topology, device: str, threads: int | None) -> Topology:
        gpus = tf.config.list_physical_devices("GPU")
        use_gpu = wants_gpu(device, len(gpus), topology.local_size, "TensorFlow")
        tf.config.set_visible_devices(gpus[topology.local_rank] if use_gpu else [], "GPU")
        if use_gpu:
            tf.config.experimental.set_memory_growth(gpus[topology.local_rank], True)
        tf.config.threading.set_intra_op_parallelism_threads(threads_per_rank(threads, topology.local_size))
        # Two operations at a time would use twice the threads. Horovod's operations wait outside this pool.
        tf.config.threading.set_inter_op_parallelism_threads(1)
        return replace(topology, device="gpu" if use_gpu else "cpu")

    def synchronize(self) -> None:
        tf.test.experimental.sync_devices()

    def seed(self, value: int) -> None:
        tf.random.set_seed(value)

    # Ranks may run the same collective in different functions, so names must not depend on their name scopes.

    def allreduce(
        self,
        tensors: list[tf.Tensor],
        group: Group,
        op: Op = "average",
        name: str = "allreduce",
        overwrite: bool = False,
    ) -> list[tf.Tensor]:
        how = self.how(group) | {"ignore_name_scope": True}
        return list(hvd.grouped_allreduce(tensors, op=self.op(op), name=name, **how))

    def allgather(self, tensor: tf.Tensor, group: Group, name: str = "allgather") -> tf.Tensor:
        return hvd.allgather(tensor, name=name, ignore_name_scope=True, **self.how(group))

    def reducescatter(
        self, tensor: tf.Tensor, group: Group, op: Op = "average", name: str = "reducescatter"
    ) -> tf.Tensor:
        return hvd.reducescatter(tensor, op=self.op(op), name=name, ignore_name_scope=True, **self.how(group))

    def bind(self, model: tf.Module, loss: AnyLoss, precision: str) -> training.TrainableModel:
        _check_kind(model)
        return training.ModuleModel(model, loss, precision)

    def cross_entropy(self, loss: Loss) -> CountedLoss:
        return partial(training.counted_cross_entropy, loss)

    def synchronize_batch_norms(self, model: tf.Module, statistics: StatisticsOf, every: bool) -> list[str]:
        from hvdkit.adapters.tensorflow import synchronized  # most runs do not need it

        _check_kind(model)
        return synchronized.synchronize_batch_norms(model, statistics, every)

    def observer(self, trainable: Trainable) -> Observer:
        return timing.Observer(hvd, trainable)


def _check_kind(model: Any) -> None:
    if not isinstance(model, tf.Module):
        kind = f"{type(model).__module__.partition('.')[0]}'s {type(model).__name__}"
        raise RequestError(f"model: expected a tf.Module, got {kind}; for a Keras model, import hvdkit.adapters.keras")


adapter = TensorFlow()
