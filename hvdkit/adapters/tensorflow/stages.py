"""A stage of a pipeline in TensorFlow and Keras (`core/passes.py`), and the messages that it starts.

Each microbatch on its way has an eager tape around a compiled forward pass: a tape that is made within a function
cannot be used outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import Any

import tensorflow as tf

from hvdkit.adapters.tensorflow.training import TrainableModel
from hvdkit.core.passes import Passed, Stage
from hvdkit.core.seam import Pending
from hvdkit.core.tensors import Scalar


class TensorFlowPassed(Passed):
    """A tape, and its ends. `inputs` are None if they are samples."""

    def __init__(
        self, trainable: TrainableModel, tape: tf.GradientTape, inputs: tf.Tensor | None, outputs: tf.Tensor
    ) -> None:
        self._trainable, self._tape, self._inputs = trainable, tape, inputs
        self.outputs = outputs

    def backward(self, gradient: tf.Tensor | Scalar | None) -> tuple[tf.Tensor | None, dict[str, tf.Tensor]]:
        if gradient is not None:
            gradient = tf.cast(gradient, self.outputs.dtype)
        parameters = list(self._trainable.parameters.values())
        sources = parameters if self._inputs is None else [*parameters, self._inputs]
        gradients = self._tape.gradient(self.outputs, sources, gradient)
        of_inputs = None if self._inputs is None else gradients.pop()
        return of_inputs, self._trainable.named(gradients)


class TensorFlowStage(Stage):
    """The passes of a model that is a stage."""

    def __init__(self, trainable: TrainableModel) -> None:
        self._trainable = trainable

        def outputs(inputs: tf.Tensor) -> tf.Tensor:
            return trainable.logits(inputs, True)

        def loss(inputs: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
            return trainable.loss(inputs, targets, outputs(inputs))

        def evaluated(inputs: tf.Tensor) -> tf.Tensor:
            return trainable.logits(inputs, False)

        self._outputs, self._loss = trainable.compile(outputs), trainable.compile(loss)
        self._evaluated = trainable.compile(evaluated)

    def forward(self, inputs: tf.Tensor, targets: tf.Tensor | None, received: bool) -> Passed:
        with tf.GradientTape() as tape:
            if received:
                tape.watch(inputs)
            outputs = self._outputs(inputs) if targets is None else self._loss(inputs, targets)
        return TensorFlowPassed(self._trainable, tape, inputs if received else None, outputs)

    def evaluate(self, inputs: tf.Tensor, targets: tf.Tensor | None) -> tf.Tensor:
        return self._evaluated(inputs) if targets is None else self._trainable.losses_of(inputs, targets)


class Message(Pending):
    """A broadcast in a thread of its own, as an operation returns when it is done."""

    def __init__(self, broadcast: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor) -> None:
        self._done: Future[tf.Tensor] = Future()
        # The interpreter does not wait for it when it ends.
        Thread(target=self._run, args=(broadcast, tensor), daemon=True).start()

    def _run(self, broadcast: Callable[[tf.Tensor], tf.Tensor], tensor: tf.Tensor) -> None:
        try:
            self._done.set_result(broadcast(tensor))
        except Exception as error:  # raised where it is waited for
            self._done.set_exception(error)

    def __call__(self) -> tf.Tensor:
        return self._done.result()

    def ready(self) -> bool:
        return self._done.done()


class Messages:
    """Broadcasts by name, compiled: eager operations of a kind all have one name, so that only one could be on its way
    within a group."""

    def __init__(self, broadcast: Callable[..., tf.Tensor]) -> None:
        self._broadcast = broadcast
        self._compiled: dict[tuple[Any, ...], Callable[[tf.Tensor], tf.Tensor]] = {}

    def start(self, tensor: tf.Tensor, how: tuple[Any, ...]) -> Pending:
        """A broadcast that goes on while this rank computes.

        `how` are the arguments of `Adapter.broadcast` after the tensor.
        """
        key = (how, tuple(tensor.shape), tensor.dtype)
        if key not in self._compiled:
            of = tf.TensorSpec.from_tensor(tensor)
            function = tf.function(lambda tensor: self._broadcast(tensor, *how), autograph=False)
            self._compiled[key] = function.get_concrete_function(of)
        return Message(self._compiled[key], tensor)
