"""Keras 3 on TensorFlow behind the seam (`hvdkit/core/adapter.py`): training goes through `model.fit`.

Horovod's own Keras front end does not work under Keras 3, so gradients are reduced inside the optimizer, by
`horovod.tensorflow`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np

from hvdkit.adapters import tensorflow as tf_adapter
from hvdkit.adapters.tensorflow import (
    allgather,
    allgather_object,
    allreduce,
    broadcast,
    cast,
    dtype,
    from_numpy,
    init,
    shutdown,
    synchronize,
    to_numpy,
)
from hvdkit.config import Loss, Optimizer
from hvdkit.core import compression as compression_
from hvdkit.core.adapter import Adapter
from hvdkit.core.compression import Compressor
from hvdkit.core.data import Batch
from hvdkit.core.loop import Loop
from hvdkit.core.state import canonical_name, check_fits, from_canonical, slot_name, to_canonical

import keras  # isort: skip  # after TensorFlow, whose log level the other adapter sets

NAME = "keras"
CAPABILITIES = tf_adapter.CAPABILITIES

__all__ = [
    "CAPABILITIES",
    "NAME",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_state",
    "cast",
    "dtype",
    "eval_step",
    "fit",
    "from_numpy",
    "init",
    "load_state",
    "prepare",
    "seed",
    "set_learning_rate",
    "shutdown",
    "state",
    "synchronize",
    "to_numpy",
    "train_step",
    "versions",
]  # fmt: skip


@dataclass
class Session:
    model: keras.Model


class DistributedSGD(keras.optimizers.Optimizer):
    """SGD with momentum in PyTorch's form, on gradients averaged over all ranks."""

    def __init__(self, settings: Optimizer, compressor: Compressor) -> None:
        super().__init__(learning_rate=settings.learning_rate, name="sgd")
        self._settings, self._compressor = settings, compressor
        self.velocities: list[keras.Variable] = []

    def build(self, variables: list[keras.Variable]) -> None:
        """Make a velocity for each variable."""
        if self.built:
            return
        super().build(variables)
        self.velocities = self.add_optimizer_variables(variables, "momentum")

    def apply(self, grads: list[Any], trainable_variables: list[keras.Variable] | None = None) -> Any:
        """Average the gradients over all ranks, then update."""
        grads = tf_adapter.dense(grads, trainable_variables or self._trainable_variables)
        grads = hvd.grouped_allreduce(grads, op=hvd.Average, compression=self._compressor, name="gradients")
        return super().apply(grads, trainable_variables)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """One variable's update; Keras hands over the TensorFlow variable behind its own."""
        velocity = self.velocities[self._get_variable_index(variable)]
        tf_adapter.apply_sgd(self._settings, learning_rate, variable, velocity.value, gradient)


class LoopCallback(keras.callbacks.Callback):
    """Calls core's hooks from `model.fit`."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self._loop = loop

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Keras counts from 0 too."""
        self._loop.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Without the reset Keras would tell the epoch's running mean instead of the step's loss."""
        self.model.reset_metrics()
        self._loop.begin_step()

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Stops `fit` in the middle of an epoch where the recipe limits the steps."""
        self._loop.end_step(np.float32((logs or {})["loss"]))
        self.model.stop_training = self._loop.finished

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Core evaluates; Keras is not asked to."""
        self._loop.end_epoch()


def versions() -> dict[str, str]:
    both = tf_adapter.versions()
    return both | {"framework": keras.__version__, "tensorflow": both["framework"]}


def seed(value: int) -> None:
    keras.utils.set_random_seed(value)


def prepare(model: keras.Model, optimizer: Optimizer, loss: Loss, compression: str) -> Session:
    def criterion(labels: Any, logits: Any) -> Any:
        # Keras hands over labels as float32, which holds class numbers exactly.
        return tf_adapter.cross_entropy(logits, keras.ops.cast(labels, "int64"), loss.label_smoothing)

    sgd = DistributedSGD(optimizer, compression_.make(compression, _this()))
    sgd.build(model.trainable_variables)
    model.compile(optimizer=sgd, loss=criterion, jit_compile=False)  # Horovod's operations know no XLA here
    return Session(model)


def broadcast_state(session: Session, root_rank: int = 0) -> None:
    variables = [*session.model.variables, *session.model.optimizer.variables]
    hvd.broadcast_variables([variable.value for variable in variables], root_rank=root_rank)


def train_step(session: Session, batch: Batch) -> np.ndarray:
    session.model.reset_metrics()
    return np.asarray(session.model.train_on_batch(batch.images, batch.labels, return_dict=True)["loss"])


def eval_step(session: Session, images: np.ndarray) -> np.ndarray:
    return np.asarray(session.model.predict_on_batch(images))


def set_learning_rate(session: Session, value: float) -> None:
    session.model.optimizer.learning_rate.assign(value)


def state(session: Session) -> dict[str, np.ndarray]:
    values = {_name(variable): to_canonical(variable.numpy()) for variable in session.model.variables}
    for variable, velocity in _slots(session):
        values[slot_name("momentum", _name(variable))] = to_canonical(velocity.numpy())
    return values


def load_state(session: Session, state: dict[str, np.ndarray]) -> None:
    variables = {_name(variable): variable for variable in session.model.variables}
    check_fits({name: to_canonical(np.empty(v.shape, bool)).shape for name, v in variables.items()}, state)
    for name, variable in variables.items():
        variable.assign(from_canonical(state[name]))
    for variable, velocity in _slots(session):
        slot = state.get(slot_name("momentum", _name(variable)))
        if slot is not None:
            velocity.assign(from_canonical(slot))


def fit(session: Session, loop: Loop) -> None:
    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for epoch in range(loop.epochs):
            for batch in loop.batches(epoch):
                yield batch.images, batch.labels

    session.model.fit(
        batches(),
        epochs=loop.epochs,
        steps_per_epoch=min(loop.steps_per_epoch, loop.total_steps),
        shuffle=False,  # the loop has shuffled
        callbacks=[LoopCallback(loop)],
        verbose=0,
    )


def _this() -> Adapter:
    return sys.modules[__name__]  # a module serves as the Protocol's object


def _name(variable: keras.Variable) -> str:
    return canonical_name(variable.path)


def _slots(session: Session) -> Iterator[tuple[keras.Variable, keras.Variable]]:
    """Each trainable variable with its velocity."""
    yield from zip(session.model.trainable_variables, session.model.optimizer.velocities, strict=True)
