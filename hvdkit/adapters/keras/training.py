"""A Keras model in training (`hvdkit/core/trainable.py`): `model.fit` calls core's step from its optimizer.

Horovod's own Keras API does not work with Keras 3, so gradients are reduced by `horovod.tensorflow`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from hvdkit.adapters.tensorflow.training import TrainableModel as TensorFlowModel
from hvdkit.adapters.tensorflow.training import check_complete
from hvdkit.core import trace_events
from hvdkit.core.loop import Driver, Loop
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.seam import AnyLoss
from hvdkit.core.session import Session
from hvdkit.core.state import canonical_name
from hvdkit.core.trainable import one_tensor
from hvdkit.errors import RequestError

import keras  # isort: skip  # after the other adapter, which sets TensorFlow's log level
import tensorflow as tf  # isort: skip


_bound: weakref.WeakKeyDictionary[TrainableModel, None] = weakref.WeakKeyDictionary()  # in their order


class TrainableModel(TensorFlowModel, Driver):
    """A model in training. It is compiled when it is bound, so that its own losses are included."""

    def __init__(self, model: keras.Model, loss: AnyLoss, precision: str) -> None:
        # Without the states of random layers, which are a rank's own.
        variables = [(_name(variable), variable.value) for variable in model.variables if not _is_seed(variable)]
        super().__init__(variables, [_name(variable) for variable in model.trainable_variables], loss, precision)
        self.model, self.transposed = model, getattr(model, "transposed", True)
        self.take_divided(model, loss)
        self.warnings = [*_compiled(model), *_other_precision(model, precision)]
        _bound[self] = None
        with floatx(self.dtype):  # the dtype of the sum of losses
            model.compile(
                optimizer=DistributedOptimizer(self),
                loss=_Loss(self),
                jit_compile=False,  # Horovod's operations do not support XLA here
                auto_scale_loss=False,  # with Keras's own scaling, each rank would check only its own gradients
            )
        model.optimizer.build(model.trainable_variables)

    def used_by(self, session: object) -> None:
        assert isinstance(session, Session)
        self.session = session  # whose step is called from Keras

    def logits(self, inputs: tf.Tensor, training: bool) -> tf.Tensor:
        outputs = one_tensor(self.model(_listed(inputs), training=training))
        check_complete(self.parameters | self.buffers, [_name(variable) for variable in self.model.weights])
        return tf.cast(outputs, self.dtype)

    def loss(self, inputs: tf.Tensor, targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        return self.model.compute_loss(x=_listed(inputs), y=targets, y_pred=logits)

    def mean_loss(self, targets: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
        """The batch's mean loss, or its sum, without the model's own losses, which Keras adds."""
        value = self._loss(logits, self.as_dtype(targets))
        counting = self.session.counting
        if counting is None or not counting.counts or not self.model.losses:
            return value
        # Where the sum will be divided by a count, so will the model's own losses, which are no sums.
        more = tf.reshape(tf.cast(counting.batch_count - 1, value.dtype), ())
        return value + more * tf.cast(tf.add_n(self.model.losses), value.dtype)

    def drive(self, loop: Loop) -> None:
        """Train by `model.fit`; a stage of a pipeline by core's loop, as `fit` finishes a batch before the next."""
        if self.session.pipeline is not None:
            loop.run()
            return
        # In Keras every epoch of a `fit` has the same number of batches, so a partial epoch needs a separate `fit`.
        while loop.progress.epoch < loop.epochs and not loop.stopped_early:
            first = loop.progress.epoch
            if not loop.group_sizes:  # the run stopped after the epoch's last update
                loop.begin_epoch(first)
                loop.end_epoch()
                loop.enter_epoch(first + 1)
                continue
            last = first + 1 if loop.progress.samples else loop.epochs
            self.model.fit(
                self._batches(loop, first, last),
                initial_epoch=first,
                epochs=last,
                steps_per_epoch=sum(loop.group_sizes),
                shuffle=False,  # the loop has shuffled already
                callbacks=[_LoopCallback(loop, self)],
                verbose=0,
            )
            if not loop.stopped_early:
                loop.enter_epoch(last)

    def _batches(self, loop: Loop, first: int, last: int) -> Iterator[tuple[Any, np.ndarray]]:
        for epoch in range(first, last):
            for group in loop.groups(epoch):
                for batch in group:
                    yield self.on_device(batch), batch.targets  # several inputs as a tuple, as `fit` expects

    def constrain(self) -> None:
        for variable in self.model.trainable_variables:
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable))

    def accumulate(self) -> None:
        """From now on, accumulate each batch's gradients in `fit` for `Step.end`."""
        if not self.model.optimizer.accumulates:
            self.session.step.prepare()
            self.model.optimizer.accumulates = True
            self.model.make_train_function(force=True)


class DistributedOptimizer(keras.optimizers.Optimizer):
    """Passes Keras's gradients to the session's step when `model.fit` applies them."""

    def __init__(self, trainable: TrainableModel) -> None:
        super().__init__(learning_rate=0.0, name="distributed")  # the session has the rate
        self._trainable = trainable
        self.accumulates = False  # whether gradients are accumulated for `Step.end`

    def scale_loss(self, loss: tf.Tensor) -> tf.Tensor:
        """The scaled loss, which Keras differentiates; it reports the unscaled one."""
        scale = self._trainable.session.update.scale
        return loss if scale is None else loss * tf.cast(scale.get(), loss.dtype)

    def apply(self, grads: list[Any], trainable_variables: list[keras.Variable] | None = None) -> None:
        """Take one batch's gradients. `iterations` counts batches, with or without an update.

        Raises RequestError if the trainable variables are not those that it was built with.
        """
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        if [id(variable) for variable in variables] != [id(variable) for variable in self._trainable_variables]:
            raise RequestError("model: other variables learn than when it was prepared; prepare it again")
        step = self._trainable.session.step
        (step.add if self.accumulates else step.finish)(self._trainable.named(grads))
        self.iterations.assign_add(1)


class _Loss(keras.losses.Loss):
    """The session's loss in the parameters' dtype."""

    def __init__(self, trainable: TrainableModel) -> None:
        super().__init__(name="loss", dtype=trainable.dtype)
        self._trainable = trainable

    def __call__(self, y_true: tf.Tensor, y_pred: tf.Tensor, sample_weight: Any = None) -> tf.Tensor:
        """The batch's mean loss. Keras's own `__call__` would make integer targets floating."""
        (y_pred,) = self._trainable.stamp((trace_events.FORWARD,), [y_pred])
        return self._trainable.mean_loss(y_true, y_pred)


class _LoopCallback(keras.callbacks.Callback):
    """Calls core's loop from `model.fit`. Its steps are batches, and one or more make an update."""

    def __init__(self, loop: Loop, trainable: TrainableModel) -> None:
        super().__init__()
        self._loop, self._trainable = loop, trainable
        self._sizes: Iterator[int] = iter(())
        self._size = 1  # batches in this update
        self._losses: list[float] = []

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Begin an epoch; both Keras and core count epochs from 0."""
        self._loop.begin_epoch(epoch)
        self._sizes = iter(self._loop.group_sizes)
        if max(self._loop.group_sizes) > 1:
            self._trainable.accumulate()

    def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """Reset the metrics, so that Keras reports the step's loss instead of the epoch's running mean."""
        self.model.reset_metrics()
        if not self._losses:
            self._size = next(self._sizes)
            self._loop.begin_step()
        trace_events.mark(trace_events.BEGIN)

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        """End an update, and stop `fit` after the recipe's last step."""
        self._losses.append((logs or {})["loss"])
        if len(self._losses) == self._size:
            if self.model.optimizer.accumulates:
                self._trainable.session.step.end(self._size)
            trace_events.mark(trace_events.UPDATED)
            counting, loss = self._trainable.session.counting, np.mean(self._losses)
            self._loop.end_step(loss if counting is None else counting.mean(loss))
            self._losses.clear()
            self.model.stop_training = self._loop.finished

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """End an epoch. Core evaluates, not Keras."""
        self._loop.end_epoch()
        self.model.stop_training = self._loop.finished


@contextmanager
def floatx(dtype: str) -> Iterator[None]:
    """A context with another default dtype, for Keras objects that have no dtype argument."""
    before = keras.config.floatx()
    keras.config.set_floatx(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before)


def reseed(value: int) -> None:
    """Set the states of the random layers of all models, which draw on from the seeds that they were built with."""
    for trainable in _bound:
        for number, state in enumerate(filter(_is_seed, trainable.model.variables)):
            state.assign(np.array([(value + number) % 2**31, 0]))


def seed_states() -> list[keras.Variable]:
    """The states of the random layers of all models, the newest's first: Python may collect older ones at any time."""
    variables = (variable for trainable in reversed(list(_bound)) for variable in trainable.model.variables)
    return list(filter(_is_seed, variables))


def _compiled(model: keras.Model) -> list[str]:
    if not model.compiled or isinstance(model.optimizer, DistributedOptimizer):
        return []
    name = type(model.optimizer).__name__
    return [
        f"model: it is compiled with {name} already: the recipe's optimizer and loss are used, not those of `compile`"
    ]


def _other_precision(model: keras.Model, precision: str) -> list[str]:
    """A line if layers compute in another dtype than the recipe's `precision` says."""
    allowed = {PRECISIONS[precision].parameters, PRECISIONS[precision].compute}
    other = [layer for layer in model._flatten_layers(include_self=False) if layer.compute_dtype not in allowed]
    if not other:
        return []
    dtype = other[0].compute_dtype
    return [f"precision: {precision}, but {len(other)} layers compute in {dtype}, such as {other[0].name}"]


def _is_seed(variable: keras.Variable) -> bool:
    """Whether it is the state of a random layer, such as dropout."""
    return str(variable.name) == "seed_generator_state"


def _listed(inputs: Any) -> Any:
    return list(inputs) if isinstance(inputs, tuple) else inputs


def _name(variable: keras.Variable) -> str:
    return canonical_name(variable.path)
