"""Keras 3 on TensorFlow behind the seam (`hvdkit/core/seam.py`): training goes through `model.fit`.

Horovod's own Keras front end does not work under Keras 3, so gradients are reduced inside the optimizer, by
`horovod.tensorflow`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdkit.adapters import capabilities
from hvdkit.adapters import tensorflow as tf_adapter
from hvdkit.adapters.keras.update import CrossEntropy, DistributedOptimizer, floatx
from hvdkit.adapters.tensorflow import (
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    broadcast,
    cast,
    dtype,
    from_numpy,
    init,
    placed,
    process_set,
    reducescatter,
    shutdown,
    synchronize,
    tensors,
    to_numpy,
    watch_hosts,
)
from hvdkit.adapters.tensorflow import timing as observing
from hvdkit.adapters.tensorflow.update import DistributedUpdate
from hvdkit.core import trace_events
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.seam import Adapter, Averaging, Gradients, Observer, peeking
from hvdkit.core.state import canonical_name
from hvdkit.core.trainer import Loop
from hvdkit.data.batches import Batch
from hvdkit.recipe.schema import Loss, Optimizer

import keras  # isort: skip  # after the other adapter, which sets TensorFlow's log level
import tensorflow as tf  # isort: skip

NAME = "keras"
CAPABILITIES = capabilities.CAPABILITIES[NAME]
CHOSEN = capabilities.CHOSEN[NAME]

__all__ = [
    "CAPABILITIES",
    "CHOSEN",
    "NAME",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "broadcast",
    "broadcast_state",
    "cast",
    "dtype",
    "eval_step",
    "fit",
    "from_numpy",
    "gradients",
    "init",
    "load_state",
    "observer",
    "placed",
    "prepare",
    "process_set",
    "reducescatter",
    "seed",
    "set_learning_rate",
    "set_weights",
    "shutdown",
    "state",
    "synchronize",
    "tensors",
    "to_numpy",
    "train_step",
    "versions",
    "watch_hosts",
    "weights",
]  # fmt: skip


@dataclass
class Session:
    """The seam's `Session`. `probe(images, labels)` returns what `DistributedUpdate.to_gradients` takes."""

    model: keras.Model
    update: DistributedUpdate
    parameters: str  # their dtype
    probe: Callable[[tf.Tensor, tf.Tensor], tuple[Any, ...]]
    step: Callable[[tf.Tensor, tf.Tensor, bool], tf.Tensor] | None = None  # of a rival that cannot use `fit`
    pools: dict[int, tf.Tensor] = field(default_factory=dict)  # of images that stay on the device


class LoopCallback(keras.callbacks.Callback):
    """Calls core's hooks from `model.fit`, whose steps are batches: some of them make an update."""

    def __init__(self, loop: Loop, session: Session) -> None:
        super().__init__()
        self._loop, self._session = loop, session
        self._sizes: Iterator[int] = iter(())
        self._size = 1  # batches in this update
        self._losses: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Keras counts from 0 too."""
        self._loop.begin_epoch(epoch)
        self._sizes = iter(self._loop.group_sizes)

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Without the reset Keras would tell the epoch's running mean instead of the step's loss."""
        self.model.reset_metrics()
        if not self._losses:
            self._size = next(self._sizes)
            _expect(self._session, self._size)
            self._loop.begin_step()
        trace_events.mark(trace_events.BEGIN)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Stops `fit` in the middle of an epoch where the recipe limits the steps."""
        self._losses.append((logs or {})["loss"])
        if len(self._losses) == self._size:
            trace_events.mark(trace_events.UPDATED)
            self._loop.end_step(np.mean(self._losses))
            self._losses.clear()
            self.model.stop_training = self._loop.finished

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Core evaluates; Keras is not asked to."""
        self._loop.end_epoch()


def versions() -> dict[str, str]:
    both = tf_adapter.versions()
    return both | {"framework": keras.__version__, "tensorflow": both["framework"]}


def seed(value: int) -> None:
    keras.utils.set_random_seed(value)


def prepare(
    model: keras.Model,
    optimizer: Optimizer,
    loss: Loss,
    compression: str = "none",
    precision: str = "fp32",
    averaging: Averaging | None = None,
) -> Session:
    variables = [(_name(variable), variable.value) for variable in model.variables]
    trained = [_name(variable) for variable in model.trainable_variables]
    keras_optimizer = DistributedOptimizer(optimizer.learning_rate)
    update = keras_optimizer.update = DistributedUpdate(
        variables, trained, optimizer, compression, precision, _this(), keras_optimizer.learning_rate.value, averaging
    )
    keras_optimizer.build(model.trainable_variables)
    parameters = PRECISIONS[precision].parameters
    with floatx(parameters):  # of the sum of losses
        model.compile(
            optimizer=keras_optimizer,
            loss=CrossEntropy(loss.label_smoothing, parameters, update),
            jit_compile=False,  # Horovod's operations know no XLA here
            auto_scale_loss=False,  # Keras's own scaling lets each rank judge its own gradients
        )

    @tf.function
    def probe(images: tf.Tensor, labels: tf.Tensor) -> tuple[Any, ...]:
        def forward() -> tuple[tf.Tensor, tf.Tensor]:
            logits = model(images, training=True)
            return tf.cast(logits, parameters), model.compute_loss(x=images, y=labels, y_pred=logits)

        return update.probe(update.backward(forward))

    return Session(model, update, parameters, probe)


def broadcast_state(session: Session, root_rank: int = 0) -> None:
    session.update.kept.broadcast(root_rank)


def train_step(session: Session, batches: Sequence[Batch]) -> np.ndarray:
    _expect(session, len(batches))
    model = session.model
    pairs = [(tf_adapter.inputs(session.pools, batch), batch.labels) for batch in batches]
    losses = [model.train_on_batch(*pair, return_dict=True)["loss"] for pair in pairs]
    return np.asarray(np.mean(losses))


def gradients(session: Session, batch: Batch) -> Gradients:
    with peeking(session.update.averaging):
        return session.update.to_gradients(*session.probe(tf.constant(batch.images), tf.constant(batch.labels)))


def eval_step(session: Session, images: np.ndarray) -> np.ndarray:
    return np.asarray(session.model.predict_on_batch(images), session.parameters)


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


def fit(session: Session, loop: Loop) -> None:
    # Keras counts as many batches in every epoch, so an epoch that was left in its middle has a `fit` of its own.
    while loop.progress.epoch < loop.epochs:
        first = loop.progress.epoch
        if not loop.group_sizes:  # its last update was taken before it was left
            loop.begin_epoch(first)
            loop.end_epoch()
            loop.enter_epoch(first + 1)
            continue
        last = first + 1 if loop.progress.images else loop.epochs
        session.model.fit(
            _batches(session, loop, first, last),
            initial_epoch=first,
            epochs=last,
            steps_per_epoch=sum(loop.group_sizes),
            shuffle=False,  # the loop has shuffled
            callbacks=[LoopCallback(loop, session)],
            verbose=0,
        )
        loop.enter_epoch(last)


def _batches(session: Session, loop: Loop, first: int, last: int) -> Iterator[tuple[Any, np.ndarray]]:
    for epoch in range(first, last):
        for group in loop.groups(epoch):
            for batch in group:
                yield tf_adapter.inputs(session.pools, batch), batch.labels


def _expect(session: Session, parts: int) -> None:
    """Let the next update take so many batches."""
    if parts == 1:  # which is so unless said otherwise
        return
    session.update.expect(parts)
    if not session.model.optimizer.in_parts:
        session.model.optimizer.in_parts = True
        session.model.make_train_function(force=True)


def observer(session: Session) -> Observer:
    return observing.KerasObserver(tf_adapter.hvd, session.update, session.model)


def _this() -> Adapter:
    return sys.modules[__name__]  # a module serves as the Protocol's object


def _name(variable: keras.Variable) -> str:
    return canonical_name(variable.path)
