"""A stage of a pipeline in PyTorch (`core/passes.py`): autograd keeps a graph for each microbatch on its way."""

from __future__ import annotations

import torch

from hvdkit.adapters.pytorch.collectives import dense
from hvdkit.adapters.pytorch.training import TrainableModel
from hvdkit.core.passes import Passed, Stage
from hvdkit.core.tensors import Scalar


class TorchPassed(Passed):
    """A graph, and its ends."""

    def __init__(self, stage: TorchStage, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        self._stage, self._inputs, self._ends = stage, inputs, outputs
        self.outputs = outputs.detach().contiguous()

    def backward(self, gradient: torch.Tensor | Scalar | None) -> tuple[torch.Tensor | None, dict[str, torch.Tensor]]:
        if gradient is not None:
            gradient = torch.as_tensor(gradient, dtype=self._ends.dtype, device=self._ends.device)
            gradient = self._stage.trainable.in_layout(gradient)
        torch.autograd.backward(self._ends, gradient)
        self._stage.note_sums()
        of_inputs = None if self._inputs.grad is None else self._inputs.grad.contiguous()
        return of_inputs, {}


class TorchStage(Stage):
    """The passes of a module that is a stage. Autograd adds in place to gradients that are there, which makes the sums.

    The first microbatch's are the sums to which it adds the others: no zeros are written, read and added to.
    """

    adds = True

    def __init__(self, trainable: TrainableModel) -> None:
        self.trainable = trainable
        self._sums: dict[str, torch.Tensor] = {}

    def sum_into(self, sums: dict[str, torch.Tensor]) -> None:
        self._sums = sums
        for name, parameter in self.trainable.trained.items():
            parameter.grad = None
            sums.pop(name, None)

    def note_sums(self) -> None:
        """After a backward pass: the sums are the parameters' gradients; zeros where a parameter was never used."""
        for name, parameter in self.trainable.trained.items():
            if parameter.grad is not None:
                self._sums[name] = dense(parameter.grad)
            elif name not in self._sums:
                self._sums[name] = torch.zeros_like(self.trainable.parameters[name])

    def forward(self, inputs: torch.Tensor, targets: torch.Tensor | None, received: bool) -> Passed:
        inputs = self.trainable.in_layout(inputs.detach()).requires_grad_(received)
        if targets is None:
            return TorchPassed(self, inputs, self.trainable.outputs_of(inputs))
        return TorchPassed(self, inputs, self.trainable.loss_of(inputs, targets)[1])

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor | None) -> torch.Tensor:
        inputs = self.trainable.in_layout(inputs)
        outputs = self.trainable.evaluated(inputs) if targets is None else self.trainable.losses_of(inputs, targets)
        return outputs.contiguous()
