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
        self.outputs = _in_order(outputs.detach())
        outputs.wait_to_read()

    def backward(
        self, gradient: mx.nd.NDArray | Scalar | None
    ) -> tuple[mx.nd.NDArray | None, dict[str, mx.nd.NDArray]]:
        if isinstance(gradient, int | float):
            gradient = mx.nd.full(self._ends.shape, gradient, ctx=self._ends.context, dtype=self._ends.dtype)
        self._trainable.variances.before_step()  # backward changes the running statistics
        mx.autograd.backward([self._ends], None if gradient is None else [gradient])
        gradients = self._trainable.gradients()
        for tensor in gradients.values():
            tensor.wait_to_read()
        self._trainable.variances.after_step((self._inputs.shape,))
        return None if self._inputs.grad is None else _in_order(self._inputs.grad), gradients


class MXNetStage(Stage):
    """The passes of a block that is a stage."""

    def __init__(self, trainable: TrainableModel) -> None:
        self._trainable = trainable
        self._buffers = list(trainable.buffers.values())
        self._unused = [mx.nd.zeros(1, ctx=buffer.context) for buffer in self._buffers]

    def forward(self, inputs: mx.nd.NDArray, targets: mx.nd.NDArray | None, received: bool) -> Passed:
        if received:
            inputs.attach_grad()
        # Backward clears the nodes of its graph, and graphs that are alive would share those of the buffers.
        mx.autograd.mark_variables(self._buffers, self._unused, "null")
        with mx.autograd.record():
            outputs = self._trainable.outputs_of(inputs)
            if targets is not None:
                outputs = self._trainable.loss_of(outputs, targets)
        return MXNetPassed(self._trainable, inputs, outputs)

    def evaluate(self, inputs: mx.nd.NDArray, targets: mx.nd.NDArray | None) -> mx.nd.NDArray:
        outputs = self._trainable.outputs_of(inputs)
        return _in_order(outputs) if targets is None else self._trainable.losses_of(outputs, targets)


def _in_order(tensor: mx.nd.NDArray) -> mx.nd.NDArray:
    """The elements in order in memory, as a message has them: of images, oneDNN has an order of its own."""
    return mx.nd.reshape(tensor, shape=tensor.shape) if tensor.ndim == 4 else tensor


class Message(Pending):
    """A broadcast by the engine."""

    def __call__(self) -> mx.nd.NDArray:
        self._tensor.wait_to_read()
        return self._tensor
