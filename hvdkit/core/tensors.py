"""The dozen tensor operations over which compression is written once, for every framework.

An adapter brings them as its `tensors`. Nothing given is changed, `scatter_add` excepted. Beside them core uses what
all tensors know: +, -, *, /, `.shape`, and slices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Tensor = Any


class Tensors(Protocol):
    """Tensors are on the rank's device. A matrix's rows are its first axis."""

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

    def absolute(self, tensor: Tensor) -> Tensor:
        """Element by element."""

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
