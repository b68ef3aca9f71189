"""What most frameworks have in common of the seam's `Trainable`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hvdkit.core import trainer
from hvdkit.core.seam import Hooks, Session, Stamp, Tensor, UpdateKernel
from hvdkit.recipe.schema import Optimizer

Function = TypeVar("Function", bound=Callable[..., Any])


class Network:
    """Of a framework that runs each operation as it is called, with torchvision's layouts.

    A subclass sets `parameters`, `buffers` and `stamp`, and has `inputs`, `backward` and `predict`.
    """

    traced = transposed = overlaps = False
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    stamp: Stamp
    session: Session

    def compile(self, function: Function) -> Function:
        """As the seam's."""
        return function

    def outside(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        """As the seam's."""
        return function(vector)

    def update_kernel(self, settings: Optimizer) -> UpdateKernel | None:
        """As the seam's."""
        return None

    def on_ready(self, ready: Callable[[str, Tensor], None]) -> None:
        """As the seam's."""
        raise NotImplementedError

    def start_average(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        """As the seam's."""
        raise NotImplementedError

    def fit(self, hooks: Hooks) -> None:
        """As the seam's."""
        trainer.drive(self.session, hooks)
