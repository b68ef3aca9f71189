"""The base class of most frameworks' `hvdkit.core.seam.Trainable`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from hvdkit.core.group import Group
from hvdkit.core.seam import Block, Joined, Pending, Session, Stamp, Tensor, UpdateKernel, Uses
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Optimizer

Function = TypeVar("Function", bound=Callable[..., Any])


def one_tensor(outputs: Any) -> Any:
    """The outputs of a model. Raises RequestError unless they are one tensor of real numbers."""
    if getattr(outputs, "shape", None) is None:
        raise RequestError(f"model: expected one tensor as its output, got a {type(outputs).__name__}")
    if "complex" in str(outputs.dtype):
        raise RequestError(f"model: expected real numbers as its output, got {outputs.dtype}; return abs() or .real")
    return outputs


def check_synchronized(hvd: Any, local: Iterable[str]) -> None:
    """Raise RequestError on several ranks if there is a layer that would be `local`, and is a synchronized batch norm
    by its class. `hvd` is the framework's Horovod module."""
    name = next(iter(local), None) if hvd.is_initialized() and hvd.size() > 1 else None
    if name is not None:
        call = "hvdkit.core.synchronized.synchronize(adapter, model, world_of(topology))"
        raise RequestError(f"model: {name} is a synchronized batch norm that would be a local one; call {call} before")


class Done:
    """A `core.seam.Pending` that has ended."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __call__(self) -> Tensor:
        return self._tensor

    def ready(self) -> bool:
        return True


class TrainableModel:
    """A model of a framework that executes eagerly, with torchvision's layouts.

    A subclass sets `parameters`, `buffers` and `stamp`, and defines `inputs`, `backward` and `predict`.
    """

    def backward(self, inputs: Tensor, targets: Tensor, scale: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        raise NotImplementedError

    traced = transposed = reports = overlaps = False
    parameters: dict[str, Tensor]
    warnings: Sequence[str] = ()
    stamp: Stamp
    session: Session

    def observe(self, inputs: Tensor, targets: Tensor) -> None:
        self.backward(inputs, targets, None)

    def constrain(self) -> None:
        """Nothing."""

    @property
    def transient(self) -> Mapping[str, Tensor]:
        return {}

    def compile(self, function: Function) -> Function:
        return function

    def outside(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        return function(vector)

    def update_kernel(
        self, settings: Optimizer, shapes: Sequence[tuple[int, ...]], like: Sequence[Tensor]
    ) -> UpdateKernel | None:
        return None

    def on_ready(self, ready: Callable[[str, Tensor], bool]) -> None:
        raise NotImplementedError

    def join_gradients(self, groups: Sequence[tuple[Sequence[str], int]]) -> Joined | None:
        return None

    def start_average(self, tensor: Tensor, group: Group, name: str) -> Pending:
        raise NotImplementedError

    def start_reducescatter(self, tensor: Tensor, group: Group, name: str) -> Pending:
        return Done(self.session.adapter.reducescatter(tensor, group, name=name))

    def start_allgather(self, tensor: Tensor, group: Group, out: Tensor, name: str) -> Pending:
        raise NotImplementedError

    def blocks(self) -> dict[str, list[str]]:
        raise NotImplementedError

    def divide(self, blocks: Mapping[str, tuple[Sequence[str], int]], uses: Uses | None = None) -> dict[str, Block]:
        raise NotImplementedError

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        session = self.session
        kept = session.buffers()
        try:
            yield
        finally:
            session.load_buffers(kept)
