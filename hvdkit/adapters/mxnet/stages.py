"""A stage of a pipeline in MXNet (`core/passes.py`): autograd keeps a graph for each microbatch on its way.

A hybridized block with static memory has memory of its own for each graph that is alive. A pass is computed when it
returns, so that it can be timed; and the engine cannot start the collectives of two microbatches, which have the same
names where layers are in parts, in another order than on other ranks.
"""

from __future__ import annotations

import mxnet as mx

from hvdkit.adapters.mxnet.training import TrainableModel
from hvdkit.core.passes import Passed, Stage
from hvdkit.core.seam import Pending
from hvdkit.core.tensors import Scalar


class MXNetPassed(Passed):
    """A graph, and its ends."""

    def __init__(self, trainable: TrainableModel, inputs: mx.nd.NDArray, outputs: mx.nd.NDArray) -> None:
        self._trainable, self._inputs, self._ends = trainable, inputs, outputs
        self.outputs = outputs.detach()
        outputs.wait_to_read()

    def backward(
        self, gradient: mx.nd.NDArray | Scalar | None
    ) -> tuple[mx.nd.NDArray | None, dict[str, mx.nd.NDArray]]:
        if isinstance(gradient, int | float):
            gradient = mx.nd.full(self._ends.shape, gradient, ctx=self._ends.context, dtype=self._ends.dtype)
        mx.autograd.backward([self._ends], None if gradient is None else [gradient])
        gradients = self._trainable.gradients()
        for tensor in gradients.values():
            tensor.wait_to_read()
        return self._inputs.grad, gradients


class MXNetStage(Stage):
    """The passes of a block that is a stage."""

    def __init__(self, trainable: TrainableModel) -> None:
        self._trainable = trainable

    def forward(self, inputs: mx.nd.NDArray, targets: mx.nd.NDArray | None, received: bool) -> Passed:
        if received:
            inputs.attach_grad()
        with mx.autograd.record():
            outputs = self._trainable.outputs_of(inputs)
            if targets is not None:
                outputs = self._trainable.loss_of(outputs, targets)
        return MXNetPassed(self._trainable, inputs, outputs)

    def evaluate(self, inputs: mx.nd.NDArray, targets: mx.nd.NDArray | None) -> mx.nd.NDArray:
        outputs = self._trainable.outputs_of(inputs)
        return outputs if targets is None else self._trainable.losses_of(outputs, targets)


class Message(Pending):
    """A broadcast by the engine."""

    def __call__(self) -> mx.nd.NDArray:
        self._tensor.wait_to_read()
        return self._tensor
