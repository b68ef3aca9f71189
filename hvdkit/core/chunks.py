"""Several chunks of a pipeline's chain on one rank, as one model: for sessions, the optimizer and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from hvdkit.core.tensors import Tensor
from hvdkit.core.trainable import Function, Trainable
from hvdkit.data.dataset import Batch


class Chunks(Trainable):
    """The chunks in the order of the chain; their passes are those of `core.passes.Stage`, chunk by chunk.

    No two of them have a tensor of the same name.
    """

    def __init__(self, parts: Sequence[Trainable]) -> None:
        self.parts, self._first = parts, parts[0]
        self.parameters = dict(chain.from_iterable(part.parameters.items() for part in parts))
        self.transposed, self.traced, self.queued = self._first.transposed, self._first.traced, self._first.queued
        self.warnings = list(dict.fromkeys(line for part in parts for line in part.warnings))
        self.stamp = self._first.stamp

    @property
    def buffers(self) -> dict[str, Tensor]:
        return dict(chain.from_iterable(part.buffers.items() for part in self.parts))

    @property
    def transient(self) -> Mapping[str, Tensor]:
        return dict(chain.from_iterable(part.transient.items() for part in self.parts))

    def inputs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return self._first.inputs(batch)

    def backward(self, *given: Any, **named: Any) -> Any:
        raise NotImplementedError("chunks of a pipeline are not neighbors")

    predict = losses = backward

    def used_by(self, session: object) -> None:
        for part in self.parts:
            part.used_by(session)

    def constrain(self) -> None:
        for part in self.parts:
            part.constrain()

    def compile(self, function: Function) -> Function:
        return self._first.compile(function)

    def outside(self, function: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
        return self._first.outside(function, vector)

    def update_kernel(self, *given: Any, **named: Any) -> Any:
        return self._first.update_kernel(*given, **named)
