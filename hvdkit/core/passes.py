"""What a framework gives of a stage of a pipeline: its forward pass, and backward from a gradient of its outputs.

And, of a model of the user's own, the stages themselves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdkit.core.tensors import Scalar, Tensor


class Passed(ABC):
    """A microbatch that has gone forward through a stage; what backward needs of it is kept."""

    outputs: Tensor  # what the next stage gets, or on the last stage the mean loss

    @abstractmethod
    def backward(self, gradient: Tensor | Scalar | None) -> tuple[Tensor | None, dict[str, Tensor]]:
        """The gradients of the stage's inputs, None if they are samples, and of its parameters by name.

        `gradient` is that of the outputs; of a loss a number, or None for 1. Called once; what was kept is let go. The
        next backward pass may overwrite the parameters' gradients. A stage that `adds` returns none of them.
        """


class Stage(ABC):
    """The passes of a `Trainable` whose model is a stage of a pipeline. Several microbatches may be on their way.

    What a pass computes is there when it returns, so that passes can be timed. If it `adds`, backward adds the
    parameters' gradients up itself, each as soon as it is computed, so that a microbatch's are never there all at once.
    """

    adds = False

    def sum_into(self, sums: dict[str, Tensor]) -> None:  # noqa: B027 - most need nothing
        """Called before the passes of a step, with the sums by name; a stage that `adds` replaces its own of them."""

    @abstractmethod
    def forward(self, inputs: Tensor, targets: Tensor | None, received: bool) -> Passed:
        """A forward pass in training mode, with the loss where there are `targets`.

        `inputs` are what the stage before has computed if they were `received`, which need a gradient, else samples.
        """

    @abstractmethod
    def evaluate(self, inputs: Tensor, targets: Tensor | None) -> Tensor:
        """The outputs in evaluation mode; where there are targets, each one's cross-entropy without smoothing."""


class Chain(ABC):
    """A model of the user's own as a chain of `blocks`, which are called one after the other."""

    blocks: Sequence[Any]

    @abstractmethod
    def check(self, inputs: Sequence[np.ndarray]) -> list[int]:
        """The work of each block for a batch, the same on all ranks.

        Raises RequestError unless the blocks compute what the model computes of it, in evaluation mode.
        """

    @abstractmethod
    def chunk(self, start: int, stop: int) -> Any:
        """The blocks from `start` up to `stop` as a model of their own, whose tensors keep their names."""
