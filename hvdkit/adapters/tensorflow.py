"""TensorFlow behind the seam (`hvdkit/core/adapter.py`): plain `tf.Module`s and a compiled step."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # read once, when TensorFlow loads: no banner in each rank's log

import horovod
import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdkit.config import Loss, Optimizer
from hvdkit.core import compression as compression_
from hvdkit.core import loop as loop_
from hvdkit.core.adapter import Adapter, Op
from hvdkit.core.data import Batch
from hvdkit.core.optimizer import decay_of
from hvdkit.core.state import canonical_name, check_distinct, check_fits, from_canonical, slot_name, to_canonical
from hvdkit.core.topology import Topology, threads_per_rank
from hvdkit.errors import RequestError

NAME = "tensorflow"
CAPABILITIES = frozenset(
    {"gpu", "float16", "float32", "float64", "int32", "int64", "int8", "uint8", "scalars", "empty"}
)

_OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max}


@dataclass
class Session:
    model: tf.Module
    learning_rate: tf.Variable
    velocities: list[tf.Variable]  # one a trainable variable, in their order
    step: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
    predict: Callable[[tf.Tensor], tf.Tensor]


def versions() -> dict[str, str]:
    return {"framework": tf.__version__, "horovod": horovod.__version__, "numpy": np.__version__}


def init(device: str, threads: int | None = None) -> Topology:
    hvd.init()
    gpus = tf.config.list_physical_devices("GPU")
    if device == "gpu" and not gpus:
        raise RequestError("device: expected a GPU that TensorFlow can see, found none; choose device=cpu")
    use_gpu = bool(gpus) and device != "cpu"
    tf.config.set_visible_devices(gpus[hvd.local_rank()] if use_gpu else [], "GPU")
    if use_gpu:
        tf.config.experimental.set_memory_growth(gpus[hvd.local_rank()], True)
    tf.config.threading.set_intra_op_parallelism_threads(threads_per_rank(threads, hvd.local_size()))
    # Two operations side by side would be twice the threads; Horovod's wait outside of this pool.
    tf.config.threading.set_inter_op_parallelism_threads(1)
    return Topology(
        hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(),
        "gpu" if use_gpu else "cpu",
    )  # fmt: skip


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


def allreduce(tensors: list[tf.Tensor], op: Op = "average", name: str = "allreduce") -> list[tf.Tensor]:
    return list(hvd.grouped_allreduce(tensors, op=_OPS[op], name=name))


def allgather(tensor: tf.Tensor, name: str = "allgather") -> tf.Tensor:
    return hvd.allgather(tensor, name=name)


def broadcast(tensor: tf.Tensor, root_rank: int = 0, name: str = "broadcast") -> tf.Tensor:
    return hvd.broadcast(tensor, root_rank, name=name)


def allgather_object(value: Any, name: str = "allgather_object") -> list[Any]:
    return list(hvd.allgather_object(value, name=name))


def prepare(model: tf.Module, optimizer: Optimizer, loss: Loss, compression: str) -> Session:
    check_distinct([_name(variable) for variable in model.variables])
    learning_rate = tf.Variable(optimizer.learning_rate, trainable=False, dtype=tf.float32)
    variables = model.trainable_variables
    velocities = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in variables]
    compressor = compression_.make(compression, _this())

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = cross_entropy(model(images, training=True), labels, loss.label_smoothing)
        gradients = dense(tape.gradient(value, variables), variables)
        gradients = hvd.grouped_allreduce(gradients, op=hvd.Average, compression=compressor, name="gradients")
        for variable, velocity, gradient in zip(variables, velocities, gradients, strict=True):
            apply_sgd(optimizer, learning_rate, variable, velocity, gradient)
        return value

    @tf.function
    def predict(images: tf.Tensor) -> tf.Tensor:
        return model(images, training=False)

    return Session(model, learning_rate, velocities, step, predict)


def dense(gradients: list[Any], variables: list[Any]) -> list[tf.Tensor]:
    """Whole gradients: a variable unused on this rank, maybe not on the others, has zeros; an embedding's rows, all."""
    return [
        tf.zeros(variable.shape, variable.dtype) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor, label_smoothing: float) -> tf.Tensor:
    """Mean softmax cross-entropy; smoothing spreads its share evenly over all classes, the true one included."""
    if label_smoothing == 0:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    else:
        classes = logits.shape[-1]
        hot = tf.one_hot(labels, classes, dtype=logits.dtype) * (1 - label_smoothing) + label_smoothing / classes
        losses = tf.nn.softmax_cross_entropy_with_logits(labels=hot, logits=logits)
    return tf.reduce_mean(losses)


def apply_sgd(
    optimizer: Optimizer, learning_rate: tf.Tensor, variable: tf.Variable, velocity: tf.Variable, gradient: tf.Tensor
) -> None:
    """`hvdkit.core.optimizer.sgd_step` in place; TensorFlow's momentum kernel has the rate outside the velocity too."""
    decay = decay_of(optimizer, tuple(variable.shape))
    if decay:
        gradient = gradient + decay * variable
    tf.raw_ops.ResourceApplyMomentum(
        var=variable.handle,
        accum=velocity.handle,
        lr=tf.cast(learning_rate, variable.dtype),
        grad=gradient,
        momentum=tf.constant(optimizer.momentum, variable.dtype),
        use_nesterov=optimizer.nesterov,
    )


def broadcast_state(session: Session, root_rank: int = 0) -> None:
    hvd.broadcast_variables([*session.model.variables, *session.velocities], root_rank=root_rank)


def train_step(session: Session, batch: Batch) -> tf.Tensor:
    return session.step(tf.constant(batch.images), tf.constant(batch.labels))


def eval_step(session: Session, images: np.ndarray) -> np.ndarray:
    return to_numpy(session.predict(tf.constant(images)))


def set_learning_rate(session: Session, value: float) -> None:
    session.learning_rate.assign(value)


def state(session: Session) -> dict[str, np.ndarray]:
    values = {_name(variable): to_canonical(variable.numpy()) for variable in session.model.variables}
    for variable, velocity in zip(session.model.trainable_variables, session.velocities, strict=True):
        values[slot_name("momentum", _name(variable))] = to_canonical(velocity.numpy())
    return values


def load_state(session: Session, state: dict[str, np.ndarray]) -> None:
    variables = {_name(variable): variable for variable in session.model.variables}
    check_fits({name: to_canonical(np.empty(v.shape, bool)).shape for name, v in variables.items()}, state)
    for name, variable in variables.items():
        variable.assign(from_canonical(state[name]))
    for variable, velocity in zip(session.model.trainable_variables, session.velocities, strict=True):
        slot = state.get(slot_name("momentum", _name(variable)))
        if slot is not None:
            velocity.assign(from_canonical(slot))


def fit(session: Session, loop: loop_.Loop) -> None:
    loop_.drive(_this(), session, loop)


def _this() -> Adapter:
    return sys.modules[__name__]  # a module serves as the Protocol's object


def _name(variable: tf.Variable) -> str:
    return canonical_name(variable.name.removesuffix(":0"))
