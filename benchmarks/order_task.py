"""A model whose layers sleep for their time in a profile, with its gradients: a device that computes elsewhere.

So a machine with few cores is four hosts of which each has a device of its own. `benchmarks/order.py` trains it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hvdkit


class Sleep(torch.autograd.Function):
    """The identity, which takes the layer's time."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, layer: Layer, *parameters: torch.Tensor) -> torch.Tensor:
        time.sleep(layer.forward_s)
        ctx.layer, ctx.parameters = layer, parameters
        return inputs * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        time.sleep(ctx.layer.backward_s)
        return gradients[0], None, *(torch.full_like(each, 1e-6) for each in ctx.parameters)


class Layer(nn.Module):
    """Parameters of the `shapes`; forward and backward take so many seconds."""

    def __init__(self, forward_s: float, backward_s: float, shapes: list[list[int]]) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        for number, shape in enumerate(shapes):
            self.register_parameter(f"tensor{number}", nn.Parameter(torch.zeros(shape)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The inputs."""
        return Sleep.apply(inputs, self, *self._parameters.values())


class Sleeping(hvdkit.Own):
    """`options`: the file of `layers`; whether gradients are sent during backward (`overlap`)."""

    def samples(self) -> Any:
        """Zeros."""
        zeros = np.zeros((4096, 1), np.float32)
        return hvdkit.ArraySplit(zeros, zeros), hvdkit.ArraySplit(zeros[:8], zeros[:8])

    def model(self) -> Any:
        """The layers in their order."""
        if self.options["overlap"]:
            from hvdkit.adapters.pytorch import training

            training.OVERLAPPED_ON.add("cpu")
        return nn.Sequential(*(Layer(*each) for each in json.loads(Path(self.options["layers"]).read_text())))

    def loss(self, outputs: Any, targets: Any) -> Any:
        """The mean squared error, which is 0."""
        return nn.functional.mse_loss(outputs, targets)


if __name__ == "__main__":
    hvdkit.run_task("pytorch", Sleeping)
