"""The base class of most frameworks' `hvdkit.core.seam.Trainable`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from hvdkit.core import trainer
from hvdkit.core.seam import Hooks, Session, Stamp, Tensor, UpdateKernel
from hvdkit.recipe.schema import Optimizer

Function = TypeVar("Function", bound=Callable[..., Any])


class TrainableModel:
    """A model of a framework that executes eagerly, with torchvision's layouts.

    A subclass sets `parameters`, `buffers` and `stamp`, and defines `inputs`, `backward` and `predict`.
    """

    traced = transposed = reports = overlaps = False
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    stamp: Stamp
    session: Session

    def compile(self, function: Function) -> Function:
        return function

    def outside(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        return function(vector)

    def update_kernel(self, settings: Optimizer) -> UpdateKernel | None:
        return None

    def on_ready(self, ready: Callable[[str, Tensor], bool]) -> None:
        raise NotImplementedError

    def start_average(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        raise NotImplementedError

    def start_reducescatter(self, tensor: Tensor, name: str) -> Callable[[], Tensor]:
        part = self.session.adapter.reducescatter(tensor, name=name)
        return lambda: part

    def fit(self, hooks: Hooks) -> None:
        trainer.drive(self.session, hooks)
