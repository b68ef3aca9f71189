"""The adapter for TensorFlow (`hvdkit/core/seam.py`): plain `tf.Module`s and a compiled step."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdkit.adapters.loading import without

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read on import; keeps start-up messages out of each rank's log
with without("sklearn"):
    import tensorflow as tf

import horovod
import horovod.tensorflow as hvd
import numpy as np

from hvdkit.adapters import capabilities
from hvdkit.adapters.collectives import Collectives
from hvdkit.adapters.tensorflow import tensors, timing, training
from hvdkit.core.group import Group, Ranks, Topology, threads_per_rank, wants_gpu
from hvdkit.core.seam import AnyLoss, Observer, Op, Session
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss

if TYPE_CHECKING:
    from hvdkit.core.synchronized import StatisticsOf

NAME = "tensorflow"
CAPABILITIES = capabilities.CAPABILITIES[NAME]
CHOSEN = capabilities.CHOSEN[NAME]


class _Collectives(Collectives):
    # Ranks may run the same collective in different functions, so names must not depend on their name scopes.

    def allreduce(
        self,
        tensors: list[tf.Tensor],
        group: Group,
        op: Op = "average",
        name: str = "allreduce",
        overwrite: bool = False,
    ) -> list[tf.Tensor]:
        return list(hvd.grouped_allreduce(tensors, op=self._ops[op], name=name, **self._scoped(group)))

    def allgather(self, tensor: tf.Tensor, group: Group, name: str = "allgather") -> tf.Tensor:
        return hvd.allgather(tensor, name=name, **self._scoped(group))

    def reducescatter(
        self, tensor: tf.Tensor, group: Group, op: Op = "average", name: str = "reducescatter"
    ) -> tf.Tensor:
        return hvd.reducescatter(tensor, op=self._ops[op], name=name, **self._scoped(group))

    def _scoped(self, group: Group) -> dict[str, Any]:
        return {"process_set": self.set_of(group), "ignore_name_scope": True}


_collectives = _Collectives(hvd, tf.constant, np.array)
allreduce, allgather, broadcast = _collectives.allreduce, _collectives.allgather, _collectives.broadcast
alltoall, reducescatter = _collectives.alltoall, _collectives.reducescatter
allgather_object, process_set = _collectives.allgather_object, _collectives.process_set

__all__ = ["tensors"]


def versions() -> dict[str, str]:
    return {"framework": tf.__version__, "horovod": horovod.__version__, "numpy": np.__version__}


def init(device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
    return placed(_collectives.start(sets), device, threads)


def placed(topology: Topology, device: str, threads: int | None) -> Topology:
    """The part of `init` after Horovod has started: pin the rank to its device and threads."""
    gpus = tf.config.list_physical_devices("GPU")
    use_gpu = wants_gpu(device, len(gpus), topology.local_size, "TensorFlow")
    tf.config.set_visible_devices(gpus[topology.local_rank] if use_gpu else [], "GPU")
    if use_gpu:
        tf.config.experimental.set_memory_growth(gpus[topology.local_rank], True)
    tf.config.threading.set_intra_op_parallelism_threads(threads_per_rank(threads, topology.local_size))
    # Two operations at a time would use twice the threads. Horovod's operations wait outside this pool.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return replace(topology, device="gpu" if use_gpu else "cpu")


def shutdown() -> None:
    hvd.shutdown()


def seed(value: int) -> None:
    tf.random.set_seed(value)


def synchronize() -> None:
    tf.test.experimental.sync_devices()


def from_numpy(array: np.ndarray) -> tf.Tensor:
    return tf.constant(array)


def to_numpy(tensor: tf.Tensor) -> np.ndarray:
    return np.array(tensor)


def dtype(tensor: tf.Tensor) -> str:
    return str(tensor.dtype.name)


def cast(tensor: tf.Tensor, dtype: str) -> tf.Tensor:
    return tf.cast(tensor, dtype)


def _check_kind(model: Any) -> None:
    if not isinstance(model, tf.Module):
        kind = f"{type(model).__module__.partition('.')[0]}'s {type(model).__name__}"
        raise RequestError(f"model: expected a tf.Module, got {kind}; for a Keras model, import hvdkit.adapters.keras")


def synchronize_batch_norms(model: tf.Module, statistics: StatisticsOf, every: bool) -> list[str]:
    from hvdkit.adapters.tensorflow import synchronized  # most runs do not need it

    _check_kind(model)
    return synchronized.synchronize_batch_norms(model, statistics, every)


def bind(model: tf.Module, loss: AnyLoss, precision: str) -> training.TrainableModel:
    _check_kind(model)
    return training.ModuleModel(model, loss, precision)


def cross_entropy(loss: Loss) -> Callable[[tf.Tensor, tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
    return partial(training.counted_cross_entropy, loss)


def observer(session: Session) -> Observer:
    return timing.Observer(hvd, session)
