"""The tensor operations over which the training step, optimizers and compression are written once.

An adapter brings them as its `tensors`. They change no argument, `assign` and `scatter_add` excepted. Beside them core
uses what all tensors know: +, -, *, /, ==, abs, `.shape`, and slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Tensor = Any


class Number(Protocol):
    """A number that changes from step to step: where a step is compiled, a variable of the framework (float64)."""

    def get(self) -> Any:
        """Its value; in a compiled step the one that it has when the step runs."""

    def set(self, value: Any) -> None:
        """Give it another value, which may depend on `get`."""


class PlainNumber:
    """A `Number` of a framework that runs each operation as it is called."""

    def __init__(self, value: float) -> None:
        self._value = value

    def get(self) -> float:
        """Its value."""
        return self._value

    def set(self, value: float) -> None:
        """Give it another value."""
        self._value = value


class Tensors(Protocol):
    """Tensors are on the rank's device. A matrix's rows are its first axis."""

    def variable(self, like: Tensor) -> Tensor:
        """A tensor of zeros with the shape and dtype of `like`, which `assign` may change, in a compiled step too."""

    def assign(self, variable: Tensor, value: Tensor) -> None:
        """Overwrite a variable or a parameter with a tensor of its shape and dtype."""

    def number(self, value: float) -> Number:
        """A number that changes from step to step."""

    def scalar(self, value: Any, like: Tensor) -> Any:
        """A number's value, such as `Number.get` returns, as arithmetic with `like` takes it."""

    def when(self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> None:
        """Call one of two functions, which return nothing, by a condition of one element."""

    def transpose(self, tensor: Tensor, axes: Sequence[int]) -> Tensor:
        """Axis i of the result is axis `axes[i]` of the tensor."""

    def sqrt(self, tensor: Tensor) -> Tensor:
        """Element by element."""

    def norm(self, tensor: Tensor) -> Tensor:
        """The Euclidean norm over all elements, as a tensor of one element and the same dtype."""

    def where(self, condition: Tensor, if_true: Tensor, if_false: Tensor) -> Tensor:
        """Choose by a comparison's result; the three have one element each."""

    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The same elements in the same order; one -1 stands for what is left."""

    def concat(self, tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
        """Joined along an axis; all have one dtype."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """All elements of tensors of one dtype, as one vector."""

    def part(self, vector: Tensor, shapes: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """The inverse of `join`: tensors of these shapes, which fill the vector."""

    def floor(self, tensor: Tensor) -> Tensor:
        """Element by element, in the same dtype."""

    def largest(self, matrix: Tensor) -> Tensor:
        """Each row's greatest element: (rows, columns) -> (rows, 1)."""

    def top_k(self, matrix: Tensor, count: int) -> Tensor:
        """Where each row's `count` greatest elements are: (rows, columns) -> (rows, count), int32, in any order."""

    def gather(self, vector: Tensor, indices: Tensor) -> Tensor:
        """The vector's elements at `indices` (int32)."""

    def scatter_add(self, vector: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        """The vector with `values` added at `indices` (int32), of which no two are equal; may change the vector."""

    def matmul(
        self, left: Tensor, right: Tensor, transpose_left: bool = False, transpose_right: bool = False
    ) -> Tensor:
        """The product of two matrices, each of which may be transposed first."""

    def uniform(self, like: Tensor, seed: int) -> Tensor:
        """Random numbers from 0 up to, not including, 1, of the shape and dtype of `like`; `seed` alone decides them.

        `seed` is from 0 to 2^63 - 1. Each framework draws its own.
        """

    def to_bytes(self, tensor: Tensor) -> Tensor:
        """The elements' bytes, the lowest first: uint8, the last axis as many times as long as an element has bytes."""

    def from_bytes(self, tensor: Tensor, dtype: str) -> Tensor:
        """The inverse of `to_bytes`; `dtype` by NumPy's name."""
