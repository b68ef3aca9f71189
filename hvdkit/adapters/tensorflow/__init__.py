"""TensorFlow behind the seam (`hvdkit/core/seam.py`): plain `tf.Module`s and a compiled step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hvdkit.adapters.loading import without

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read once, when TensorFlow loads: no banner in each rank's log
with without("sklearn"):
    import tensorflow as tf

import horovod
import horovod.tensorflow as hvd
import numpy as np

from hvdkit.adapters import capabilities
from hvdkit.adapters.collectives import Collectives
from hvdkit.adapters.tensorflow import tensors as tensorflow_tensors
from hvdkit.adapters.tensorflow import timing as observing
from hvdkit.adapters.tensorflow.update import DistributedUpdate, Found
from hvdkit.core import trace_events
from hvdkit.core import trainer as loop_
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.seam import Adapter, Averaging, Gradients, Observer, peeking
from hvdkit.core.state import canonical_name
from hvdkit.core.topology import Topology, threads_per_rank, wants_gpu
from hvdkit.data.batches import Batch
from hvdkit.data.dataset import on_device
from hvdkit.recipe.schema import Loss, Optimizer

NAME = "tensorflow"
CAPABILITIES = capabilities.CAPABILITIES[NAME]
CHOSEN = capabilities.CHOSEN[NAME]
tensors = tensorflow_tensors

# Those of the seam's functions that are written in a file of their own.
_collectives = Collectives(hvd, lambda splits: tf.constant(splits, tf.int32))
allreduce, allgather, broadcast = _collectives.allreduce, _collectives.allgather, _collectives.broadcast
alltoall, reducescatter = _collectives.alltoall, _collectives.reducescatter
allgather_object, process_set = _collectives.allgather_object, _collectives.process_set
watch_hosts = _collectives.watch_hosts


@dataclass
class Session:
    """The seam's `Session`, with three compiled functions.

    `step(images, labels, in_parts)` returns the batch's mean loss, `probe(images, labels)` what
    `DistributedUpdate.to_gradients` takes, `predict(images)` logits (n, classes).
    """

    model: tf.Module
    update: DistributedUpdate
    step: Callable[[tf.Tensor, tf.Tensor, bool], tf.Tensor]
    probe: Callable[[tf.Tensor, tf.Tensor], tuple[Any, ...]]
    predict: Callable[[tf.Tensor], tf.Tensor]
    pools: dict[int, tf.Tensor] = field(default_factory=dict)  # of images that stay on the device


def versions() -> dict[str, str]:
    return {"framework": tf.__version__, "horovod": horovod.__version__, "numpy": np.__version__}


def init(device: str, threads: int | None = None) -> Topology:
    return placed(_collectives.start(), device, threads)


def placed(topology: Topology, device: str, threads: int | None) -> Topology:
    """Pin the rank that stands there to its device and threads, as `init` does."""
    gpus = tf.config.list_physical_devices("GPU")
    use_gpu = wants_gpu(device, len(gpus), topology.local_size, "TensorFlow")
    tf.config.set_visible_devices(gpus[topology.local_rank] if use_gpu else [], "GPU")
    if use_gpu:
        tf.config.experimental.set_memory_growth(gpus[topology.local_rank], True)
    tf.config.threading.set_intra_op_parallelism_threads(threads_per_rank(threads, topology.local_size))
    # Two operations side by side would be twice the threads; Horovod's wait outside of this pool.
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


def prepare(
    model: tf.Module,
    optimizer: Optimizer,
    loss: Loss,
    compression: str = "none",
    precision: str = "fp32",
    averaging: Averaging | None = None,
) -> Session:
    variables = [(_name(variable), variable) for variable in model.variables]
    trained = [_name(variable) for variable in model.trainable_variables]
    update = DistributedUpdate(variables, trained, optimizer, compression, precision, _this(), averaging=averaging)
    parameters = tf.as_dtype(PRECISIONS[precision].parameters)

    def logits_of(images: tf.Tensor, training: bool) -> tf.Tensor:
        images = tf.cast(images, parameters) if images.dtype.is_floating else images
        return tf.cast(model(images, training=training), parameters)

    def backward(images: tf.Tensor, labels: tf.Tensor) -> Found:
        def forward() -> tuple[tf.Tensor, tf.Tensor]:
            (logits,) = update.stamp((trace_events.FORWARD,), [logits_of(images, True)])
            return logits, cross_entropy(logits, labels, loss.label_smoothing)

        return update.backward(forward)

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor, in_parts: bool) -> tf.Tensor:
        _, value, gradients = backward(images, labels)
        update(gradients, in_parts)
        return value

    @tf.function
    def probe(images: tf.Tensor, labels: tf.Tensor) -> tuple[Any, ...]:
        return update.probe(backward(images, labels))

    @tf.function
    def predict(images: tf.Tensor) -> tf.Tensor:
        return logits_of(images, False)

    return Session(model, update, step, probe, predict)


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float) -> tf.Tensor:
    """Mean softmax cross-entropy of `logits` (n, classes) and `labels` (n,), whole numbers; in the logits' dtype.

    Smoothing spreads its share evenly over all classes, the true one included (Szegedy et al. 2016, section 7).
    """
    if label_smoothing == 0:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    else:
        classes = logits.shape[-1]
        hot = tf.one_hot(labels, classes, dtype=logits.dtype) * (1 - label_smoothing) + label_smoothing / classes
        losses = tf.nn.softmax_cross_entropy_with_logits(labels=hot, logits=logits)
    return tf.reduce_mean(losses)


def broadcast_state(session: Session, root_rank: int = 0) -> None:
    session.update.kept.broadcast(root_rank)


def train_step(session: Session, batches: Sequence[Batch]) -> tf.Tensor:
    in_parts = len(batches) > 1
    if in_parts:
        session.update.expect(len(batches))
    losses = [_part(session, batch, in_parts) for batch in batches]
    trace_events.mark(trace_events.UPDATED)
    return tf.reduce_mean(losses) if in_parts else losses[0]


def _part(session: Session, batch: Batch, in_parts: bool) -> tf.Tensor:
    trace_events.mark(trace_events.BEGIN)
    images, labels = inputs(session.pools, batch), tf.constant(batch.labels)
    trace_events.mark(trace_events.INPUTS)
    return session.step(images, labels, in_parts)


def inputs(pools: dict[int, tf.Tensor], batch: Batch) -> tf.Tensor:
    """A batch's images on the device, where `pools` are kept."""
    return on_device(batch, pools, tf.constant, tf.gather)


def gradients(session: Session, batch: Batch) -> Gradients:
    with peeking(session.update.averaging):
        return session.update.to_gradients(*session.probe(tf.constant(batch.images), tf.constant(batch.labels)))


def eval_step(session: Session, images: np.ndarray) -> np.ndarray:
    return to_numpy(session.predict(tf.constant(images)))


def set_learning_rate(session: Session, value: float) -> None:
    session.update.learning_rate.assign(value)


def weights(session: Session) -> tf.Tensor:
    return session.update.kept.weights()


def set_weights(session: Session, weights: tf.Tensor) -> None:
    session.update.kept.set_weights(weights)


def state(session: Session) -> dict[str, np.ndarray]:
    return session.update.kept.state()


def load_state(session: Session, state: dict[str, np.ndarray]) -> None:
    session.update.kept.load_state(state)


def fit(session: Session, loop: loop_.Loop) -> None:
    loop_.drive(_this(), session, loop)


def observer(session: Session) -> Observer:
    return observing.Observer(hvd, session.update, session)


def _this() -> Adapter:
    return sys.modules[__name__]  # a module serves as the Protocol's object


def _name(variable: tf.Variable) -> str:
    return canonical_name(variable.name.removesuffix(":0"))
