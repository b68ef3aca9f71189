"""A stage of a pipeline in PyTorch (`core/passes.py`): autograd keeps a graph for each microbatch on its way."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hvdkit.adapters.pytorch.training import TrainableModel
from hvdkit.core.passes import Passed, Stage
from hvdkit.core.tensors import Scalar


class TorchPassed(Passed):
    """A graph, and its ends."""

    def __init__(self, trainable: TrainableModel, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        self._trainable, self._inputs, self._ends = trainable, inputs, outputs
        self.outputs = outputs.detach().contiguous()

    def backward(self, gradient: torch.Tensor | Scalar | None) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        if gradient is not None:
            gradient = torch.as_tensor(gradient, dtype=self._ends.dtype, device=self._ends.device)
            gradient = self._trainable.in_layout(gradient)
        torch.autograd.backward(self._ends, gradient)
        of_inputs = None if self._inputs.grad is None else self._inputs.grad.contiguous()
        return of_inputs, {}


class TorchStage(Stage):
    """The passes of a module that is a stage. Autograd adds in place to gradients that are there: the sums."""

    adds = True

    def __init__(self, trainable: TrainableModel) -> None:
        self._trainable = trainable

    def sum_into(self, sums: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._trainable.trained.items():
            parameter.grad = sums[name]

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None, received: bool) -> Passed:
        inputs = self._trainable.in_layout(inputs.detach()).requires_grad_(received)
        if targets is None:
            return TorchPassed(self._trainable, inputs, self._trainable.outputs_of(inputs))
        return TorchPassed(self._trainable, inputs, self._trainable.loss_of(inputs, targets)[1])

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
        inputs = self._trainable.in_layout(inputs)
        outputs = self._trainable.evaluated(inputs) if targets is None else self._trainable.losses_of(inputs, targets)
        return outputs.contiguous()
