"""As `order_task.py`, for MXNet: operations of its engine that sleep."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

import hvdkit


class Sleep(mx.operator.CustomOp):
    """The identity, which takes the layer's time; its gradients are small and all alike."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        """The inputs."""
        time.sleep(self.forward_s)
        self.assign(out_data[0], req[0], in_data[0])

    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        """The inputs' gradient, and 1e-6 for each parameter."""
        time.sleep(self.backward_s)
        self.assign(in_grad[0], req[0], out_grad[0])
        for gradient, how in zip(in_grad[1:], req[1:], strict=True):
            self.assign(gradient, how, mx.nd.full(gradient.shape, 1e-6))


@mx.operator.register("sleep")
class SleepProperties(mx.operator.CustomOpProp):
    """Seconds, and the shapes of the parameters, as text."""

    def __init__(self, forward_s: str, backward_s: str, shapes: str) -> None:
        super().__init__(need_top_grad=True)
        self.seconds, self.shapes = (float(forward_s), float(backward_s)), json.loads(shapes)

    def list_arguments(self) -> list[str]:
        """The inputs and the parameters."""
        return ["data", *(f"tensor{number}" for number in range(len(self.shapes)))]

    def infer_shape(self, in_shape: Any) -> Any:
        """The output is like the input."""
        return [in_shape[0], *self.shapes], [in_shape[0]], []

    def create_operator(self, ctx: Any, shapes: Any, dtypes: Any) -> Sleep:
        """The operator."""
        return Sleep(*self.seconds)


class Layer(mx.gluon.HybridBlock):
    """Parameters of the `shapes`; forward and backward take so many seconds."""

    def __init__(self, forward_s: float, backward_s: float, shapes: list[list[int]]) -> None:
        super().__init__()
        self._how = {"forward_s": str(forward_s), "backward_s": str(backward_s), "shapes": json.dumps(shapes)}
        with self.name_scope():
            for number, shape in enumerate(shapes):
                setattr(self, f"tensor{number}", self.params.get(f"tensor{number}", shape=tuple(shape), init="zeros"))

    def hybrid_forward(self, F: Any, x: Any, **tensors: Any) -> Any:
        """The inputs."""
        return F.Custom(
            x, *(tensors[f"tensor{number}"] for number in range(len(tensors))), op_type="sleep", **self._how
        )


class Sleeping(hvdkit.Own):
    """`options`: the file of `layers`; the size of a piece (`piece_mib`)."""

    def samples(self) -> Any:
        """Zeros."""
        zeros = np.zeros((4096, 1), np.float32)
        return hvdkit.ArraySplit(zeros, zeros), hvdkit.ArraySplit(zeros[:8], zeros[:8])

    def model(self) -> Any:
        """The layers in their order."""
        from hvdkit.strategies import priority

        priority.PIECE_BYTES = int(self.options["piece_mib"] * 2**20)
        made = mx.gluon.nn.HybridSequential()
        made.add(*(Layer(*each) for each in json.loads(Path(self.options["layers"]).read_text())))
        made.initialize()
        return made

    def loss(self, outputs: Any, targets: Any) -> Any:
        """The mean squared error, which is 0."""
        return ((outputs - targets) ** 2).mean()


if __name__ == "__main__":
    hvdkit.run_task("mxnet", Sleeping)
