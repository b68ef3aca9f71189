"""The adapter for TensorFlow (`hvdkit/core/seam.py`): plain `tf.Module`s and a compiled step."""

from __future__ import annotations

import os
from dataclasses import replace
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
from hvdkit.core.seam import AnyLoss, Observer, Pending
from hvdkit.core.trainable import Trainable

if TYPE_CHECKING:
    from hvdkit.adapters.tensorflow.stages import Messages
    from hvdkit.core.passes import Stage


class TensorFlow(TensorFlowTensors, HorovodAdapter):
    """TensorFlow, with Horovod."""

    NAME = "tensorflow"
    CAPABILITIES = capabilities.CAPABILITIES[NAME]
    CHOSEN = capabilities.CHOSEN[NAME]
    batch_norms, layer_parts = "hvdkit.adapters.tensorflow.synchronized", "hvdkit.adapters.tensorflow.parts"
    counted_cross_entropy = staticmethod(training.counted_cross_entropy)
    horovod, framework = hvd, tf
    overwrites = False

    _messages: Messages | None = None  # between stages

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

    def _alone(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.identity(tensor)  # also in a compiled step, which may make no variables

    def how(self, group: Group) -> dict[str, Any]:
        # Ranks may run the same collective in different functions, so names must not depend on their name scopes.
        return super().how(group) | {"ignore_name_scope": True}

    def bind(self, model: tf.Module, loss: AnyLoss, precision: str) -> training.TrainableModel:
        return training.ModuleModel(model, loss, precision)

    def start_broadcast(self, tensor: tf.Tensor, group: Group, root_rank: int, name: str) -> Pending:
        from hvdkit.adapters.tensorflow.stages import Messages  # only stages need it

        self._messages = self._messages or Messages(self.broadcast)
        return self._messages.start(tensor, (group, root_rank, name))

    def stage(self, trainable: Trainable) -> Stage:
        from hvdkit.adapters.tensorflow.stages import TensorFlowStage

        assert isinstance(trainable, training.TrainableModel)
        return TensorFlowStage(trainable)

    def observer(self, trainable: Trainable) -> Observer:
        return timing.Observer(hvd, trainable)


adapter = TensorFlow()
