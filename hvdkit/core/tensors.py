"""The tensor operations with which the training step, optimizers and compression are written once for all frameworks.

An adapter provides them as its `tensors`. Only `assign`, `blend` and `scatter_add` change an argument. Core also uses
what all tensors support: +, -, *, /, ==, abs, `.shape`, and slices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Tensor = Any  # of a framework


class Number(Protocol):
    """A number that changes from step to step; for a compiled step, a float64 variable of the framework."""

    def get(self) -> Any:
        """Its value; in a compiled step, the value at the time when the step runs."""

    def set(self, value: Any) -> None:
        """Set its value, which may be computed from `get`."""


class PlainNumber:
    """A `Number` for frameworks that run operations eagerly."""

    def __init__(self, value: float) -> None:
        self._value = value

    def get(self) -> float:
        """The current value."""
        return self._value

    def set(self, value: float) -> None:
        """Set the value."""
        self._value = value


class Tensors(Protocol):
    """An adapter's tensor operations, on the rank's device. The rows of a matrix are its first axis."""

    def variable(self, like: Tensor) -> Tensor:
        """A tensor of zeros with the shape and dtype of `like`, for `assign`, also in a compiled step."""

    def assign(self, variable: Tensor, value: Tensor) -> None:
        """Overwrite a variable or a parameter with a tensor of its shape and dtype."""

    def number(self, value: float) -> Number:
        """Create a `Number`."""

    def when(self, condition: Any, then: Callable[[], Any], otherwise: Callable[[], Any]) -> None:
        """Call `then` or `otherwise`, which return nothing, depending on a condition of one element."""

    def transpose(self, tensor: Tensor, axes: Sequence[int]) -> Tensor:
        """Permute the axes: axis i of the result is axis `axes[i]` of the tensor."""

    def sqrt(self, tensor: Tensor) -> Tensor:
        """The elementwise square root."""

    def norm(self, tensor: Tensor) -> Tensor:
        """The Euclidean norm over all elements, as a tensor of one element and the same dtype."""

    def where(self, condition: Tensor, if_true: Tensor, if_false: Tensor) -> Tensor:
        """`if_true` where the condition holds, else `if_false`; each argument has one element."""

    def scaled(self, tensor: Tensor, factor: Tensor) -> Tensor:
        """The tensor times a factor of one element; in the tensor's own memory where the framework can."""

    def blend(self, averages: Sequence[Tensor], values: Sequence[Tensor], kept: Any) -> None:
        """Overwrite each variable a with kept × a + (1 − kept) × its value; `kept` a number or `Number`'s value."""

    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The same elements in the same order in another shape; one size may be -1 and is then inferred."""

    def concat(self, tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
        """Concatenate tensors of one dtype along an axis."""

    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Flatten tensors of one dtype and concatenate them into one vector."""

    def part(self, vector: Tensor, shapes: Sequence[Sequence[int]]) -> Sequence[Tensor]:
        """The inverse of `join`: split a vector into tensors of these shapes, which use all its elements."""

    def floor(self, tensor: Tensor) -> Tensor:
        """The elementwise floor, in the same dtype."""

    def largest(self, matrix: Tensor) -> Tensor:
        """The largest element of each row: (rows, columns) -> (rows, 1)."""

    def top_k(self, matrix: Tensor, count: int) -> Tensor:
        """Indices of each row's `count` largest elements: (rows, columns) -> (rows, count), int32, in any order."""

    def gather(self, vector: Tensor, indices: Tensor) -> Tensor:
        """The vector's elements at `indices` (int32)."""

    def scatter_add(self, vector: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        """The vector with `values` added at `indices` (int32, all different); may change the vector in place."""

    def matmul(
        self, left: Tensor, right: Tensor, transpose_left: bool = False, transpose_right: bool = False
    ) -> Tensor:
        """The product of two matrices, each optionally transposed first."""

    def uniform(self, like: Tensor, seed: int) -> Tensor:
        """Random numbers in [0, 1) with the shape and dtype of `like`, determined by `seed` alone.

        `seed` is from 0 to 2^63 - 1. Frameworks draw different numbers for the same seed.
        """

    def to_bytes(self, tensor: Tensor) -> Tensor:
        """The elements' bytes, little-endian: uint8, the last axis longer by the number of bytes per element."""

    def from_bytes(self, tensor: Tensor, dtype: str) -> Tensor:
        """The inverse of `to_bytes`; `dtype` by NumPy's name."""


class Casts(Protocol):
    """The part of an adapter that `scalar` needs."""

    def dtype(self, tensor: Tensor) -> str: ...
    def cast(self, tensor: Tensor, dtype: str) -> Tensor: ...


def scalar(adapter: Casts, value: Any, like: Tensor) -> Any:
    """A number, or the value of a `Number`, for arithmetic with `like`: a tensor gets its dtype."""
    return value if isinstance(value, int | float) else adapter.cast(value, adapter.dtype(like))
