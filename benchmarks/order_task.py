"""A model whose layers sleep for their time in a profile, with its gradients: a device that computes elsewhere.

So a machine with few cores is four hosts of which each has a device of its own. `benchmarks/order.py` trains it.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import hvdkit

_spans: list[tuple[str, str, int, int]] = []  # what each layer did when, in nanoseconds
_kept: Path | None = None  # the file for them


def _sleep(kind: str, layer: Layer, seconds: float) -> None:
    begin = time.perf_counter_ns()
    time.sleep(seconds)
    _spans.append((kind, layer.name, begin, time.perf_counter_ns()))
    if _kept is not None and (kind, layer.name) == ("backward", "0"):  # the end of a step
        _kept.write_text(json.dumps({"ahead": time.time_ns() - time.perf_counter_ns(), "layers": _spans}))


class Sleep(torch.autograd.Function):
    """The identity, which takes the layer's time."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, layer: Layer, *parameters: torch.Tensor) -> torch.Tensor:
        _sleep("forward", layer, layer.forward_s)
        ctx.layer, ctx.parameters = layer, parameters
        return inputs * 1.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        _sleep("backward", ctx.layer, ctx.layer.backward_s)
        return gradients[0], None, *(torch.full_like(each, 1e-6) for each in ctx.parameters)


class Layer(nn.Module):
    """Parameters of the `shapes`; forward and backward take so many seconds."""

    def __init__(self, name: str, forward_s: float, backward_s: float, shapes: list[list[int]]) -> None:
        super().__init__()
        self.name, self.forward_s, self.backward_s = name, forward_s, backward_s
        for number, shape in enumerate(shapes):
            self.register_parameter(f"tensor{number}", nn.Parameter(torch.zeros(shape)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The inputs."""
        return Sleep.apply(inputs, self, *self._parameters.values())


class Sleeping(hvdkit.Own):
    """`options`: the file of `layers`; whether gradients are sent during backward (`overlap`); the size of a piece
    (`piece_mib`); a file for when rank 0's layers computed (`spans`)."""

    def samples(self) -> Any:
        """Zeros."""
        zeros = np.zeros((4096, 1), np.float32)
        return hvdkit.ArraySplit(zeros, zeros), hvdkit.ArraySplit(zeros[:8], zeros[:8])

    def model(self) -> Any:
        """The layers in their order."""
        global _kept
        from hvdkit.strategies import priority

        priority.PIECE_BYTES = int(self.options["piece_mib"] * 2**20)
        if self.options["overlap"]:
            from hvdkit.adapters.pytorch import training

            training.OVERLAPPED_ON.add("cpu")
        if "spans" in self.options and os.environ["HOROVOD_RANK"] == "0":
            _kept = Path(self.options["spans"])
        layers = json.loads(Path(self.options["layers"]).read_text())
        return nn.Sequential(*(Layer(str(number), *each) for number, each in enumerate(layers)))

    def loss(self, outputs: Any, targets: Any) -> Any:
        """The mean squared error, which is 0."""
        return nn.functional.mse_loss(outputs, targets)


if __name__ == "__main__":
    hvdkit.run_task("pytorch", Sleeping)
