"""A model in training: the operations that only its framework can do. The session uses it (`core/session.py`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.tensors import Scalar, Shape, Tensor
from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.data.dataset import Batch
    from hvdkit.recipe.schema import Optimizer

Function = TypeVar("Function", bound=Callable[..., object])
Stamp = Callable[[tuple[str, ...], list[Tensor]], list[Tensor]]
Slots = tuple[Tensor, ...]  # of one weight
# weights, gradients, slots by weight, the learning rate and both bias corrections -> the new weights
UpdateKernel = Callable[[list[Tensor], list[Tensor], list[Slots], Scalar, tuple[Scalar, Scalar]], list[Tensor]]

Phase = Literal["forward", "backward", "prediction"]  # the last is a forward pass that no backward follows


class Joined(Protocol):
    """Gradients that are parts of vectors, of which each can be sent as it is."""

    vectors: list[Tensor]

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """The parts by parameter."""

    def holds(self, gradients: Mapping[str, Tensor]) -> bool:
        """Whether these are the parts themselves, so that what changes the vectors changes them."""


class Block(Protocol):
    """Parameters as parts of one vector whose memory can be freed. A new block has no memory."""

    vector: Tensor

    def allocate(self) -> None:
        """Get memory for the vector, whose values are then undefined."""

    def free(self) -> None:
        """Free the memory. Tensors that the framework has kept for backward have it again after `allocate`."""


class Uses(Protocol):
    """Callbacks before and after each use of a block's parameters."""

    def begin(self, block: str, phase: Phase) -> None:
        """Before the block's forward pass, or its backward pass, which may be repeated."""

    def end(self, block: str, phase: Phase) -> None:
        """After it; after a backward pass only if each parameter has a gradient."""


class Hooks(ABC):
    """A `Trainable` that hands over gradients during backward."""

    @abstractmethod
    def on_ready(self, ready: Callable[[str, Tensor], bool]) -> None:
        """Call `ready(name, gradient)` as soon as backward has computed a gradient. Where it returns true, backward
        keeps no reference to the gradient and leaves it out of its result."""

    def on_use(self, use: Callable[[Collection[str]], None]) -> None:
        """Call `use(names)` before a forward pass needs the parameters of these names, and at its end for all. Those
        that no layer of their own has used in the first pass are needed at the start. For `order: priority`."""
        raise NotImplementedError

    @abstractmethod
    def join_gradients(self, groups: Sequence[tuple[Sequence[str], int]]) -> Joined:
        """Have `backward` leave gradients in vectors: for each group those of its parameters, in its order, in a vector
        of its size, which ends with zeros. `on_ready` then hands over the parts."""


class Divisible(ABC):
    """A `Trainable` whose parameters can be freed between their uses: `shard-parameters`."""

    @abstractmethod
    def blocks(self) -> dict[str, list[str]]:
        """The names of the parameters by block, in forward order: a block's are used together. ROOT_BLOCK is the first,
        unless it has none."""

    @abstractmethod
    def divide(self, blocks: Mapping[str, tuple[Sequence[str], int]], uses: Uses | None = None) -> Mapping[str, Block]:
        """Put the parameters into blocks, each with the names and the size of its vector, and report their `uses`.
        Their values are lost, and `parameters` are new tensors."""


def marked(names: tuple[str, ...], tensors: list[Tensor]) -> list[Tensor]:
    """The `stamp` of a framework whose operations are finished when they return."""
    for name in names:
        trace_events.mark(name)
    return tensors


class Trainable(ABC):
    """A model in training, by default of a framework that executes eagerly, with torchvision's layouts.

    `parameters` and `buffers` map torchvision's names to tensors, which `Tensors.assign` changes. If `transposed`,
    kernels are HWIO and matrices (in, out), unless a model's attribute `transposed` is False. If `traced`, functions
    are compiled once and run many times. `stamp(names, tensors)` returns the tensors; while trace events are recorded
    it also records, under these names of `core.trace_events`, when the tensors are ready. `overlaps` says whether
    gradients are best sent during backward, by `Hooks`. If `queued`, operations return before they are executed, and
    each then waits for what it reads, also collectives.
    """

    parameters: dict[str, Tensor]
    transposed = False
    traced = False
    overlaps = False
    queued = False
    warnings: Sequence[str] = ()  # lines about what training does otherwise than the model says, such as casts
    averages_weights = False  # whether weights are averaged; set by the session
    stamp: Stamp = staticmethod(marked)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The other tensors of checkpoints, such as frozen parameters."""
        return {}

    @property
    def transient(self) -> Mapping[str, Tensor]:
        """The tensors that no checkpoint has: the model makes them anew."""
        return {}

    @abstractmethod
    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The batch's inputs and targets on the device."""

    @abstractmethod
    def backward(
        self, inputs: Tensor, targets: Tensor, scale: Scalar | None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Outputs, mean loss, and the gradients of loss × `scale` by parameter (None: of the loss).

        Each parameter has a gradient, zero for an unused one. The next call may overwrite the gradients.
        Stamps FORWARD.
        """

    @abstractmethod
    def predict(self, inputs: np.ndarray) -> np.ndarray:
        """The outputs for a batch's inputs, in evaluation mode."""

    @abstractmethod
    def losses(self, batch: Batch) -> np.ndarray:
        """Each target's cross-entropy (n, …) without label smoothing, in evaluation mode.

        Outputs are (n, …, classes) and stay on the device, targets are (n, …), whole numbers.
        """

    def observe(self, inputs: Tensor, targets: Tensor) -> None:
        """A forward pass in training mode, of which only the changes of buffers matter."""
        self.backward(inputs, targets, None)

    def used_by(self, session: object) -> None:
        """Called once with the `core.session.Session` that uses the model."""
        return None

    def unchanged(self) -> AbstractContextManager[None]:
        """A context after which what the model keeps beside its buffers is what it was before."""
        return nullcontext()

    def constrain(self) -> None:  # noqa: B027 - most models allow everything
        """Project the parameters on what the model allows them to be, after an update. Traced into a graph."""

    def compile(self, function: Function) -> Function:
        """The function compiled in the framework's fastest way; it takes and returns tensors."""
        return function

    def outside(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        """Call a Python function on a vector from a compiled function; the result has the vector's shape and dtype."""
        return function(vector)

    # For speed

    def update_kernel(
        self, settings: Optimizer, shapes: Sequence[Shape], like: Sequence[Tensor]
    ) -> UpdateKernel | None:
        """The framework's own kernel for the rule of `core.update_rules`, or None to use that rule.

        `like` has a tensor like each weight: a parameter, or a vector of a part of it; with `traced`, a variable.
        `shapes` are those of the parameters, which decide on weight decay.

        The kernel takes weights, gradients, slots by weight, the learning rate, and both bias corrections. It updates
        in place, and returns the new weights; with `traced`, weights that are no variables may be left as they are.
        """
        return None


def one_tensor(outputs: Tensor) -> Tensor:
    """The outputs of a model. Raises RequestError unless they are one tensor of real numbers."""
    if getattr(outputs, "shape", None) is None:
        raise RequestError(f"model: expected one tensor as its output, got a {type(outputs).__name__}")
    if "complex" in str(outputs.dtype):
        raise RequestError(f"model: expected real numbers as its output, got {outputs.dtype}; return abs() or .real")
    return outputs
