"""The tensor operations with which the training step, optimizers and compression are written once for all frameworks.

They are the first part of an adapter (`core/seam.py`). The defaults suit arrays that have NumPy's operators, slices and
methods. Core also uses what all tensors support: +, -, *, /, ==, <, >, abs, `.shape`, and slices.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, final

import numpy as np

Tensor = Any  # of a framework: the one place where its types are not known
Scalar = float | Tensor  # a number, or a tensor of one element
Shape = tuple[int, ...]


class Number:
    """A number that changes from step to step. In a compiled step it is a float64 variable of the framework."""

    def __init__(self, value: float) -> None:
        self._value: Scalar = value

    def get(self) -> Scalar:
        """Its value; in a compiled step, the value at the time when the step runs."""
        return self._value

    def set(self, value: Scalar) -> None:
        """Set its value, which may be computed from `get`."""
        self._value = value


class Tensors(ABC):
    """A framework's tensor operations, on the rank's device. The rows of a matrix are its first axis.

    Only `assign`, `add`, `clear`, `blend`, `scaled`, `divided` and `scatter_add` change an argument.
    """

    @abstractmethod
    def from_numpy(self, array: np.ndarray) -> Tensor:
        """A tensor on this rank's device with the array's shape, dtype and values; a copy."""

    def to_numpy(self, tensor: Tensor) -> np.ndarray:
        """The tensor's values as an array, those of bfloat16 in float32 where NumPy lacks it; waits for the device."""
        return np.array(tensor)

    @final
    def dtype(self, tensor: Tensor) -> str:
        """The tensor's dtype by NumPy's name."""
        kind = tensor.dtype  # a framework's own, or a class of NumPy's
        name = np.dtype(kind).name if isinstance(kind, type) else getattr(kind, "name", None)
        return name or str(kind).rpartition(".")[2]

    def cast(self, tensor: Tensor, dtype: str) -> Tensor:
        """The tensor in another dtype, by NumPy's name."""
        return tensor.astype(dtype)

    # Variables and control flow: a framework that compiles a step has its own.

    def variable(self, like: Tensor) -> Tensor:
        """A tensor of zeros with the shape and dtype of `like`, for `assign`, also in a compiled step."""
        return self.from_numpy(np.zeros(tuple(like.shape), self.dtype(like)))

    def assign(self, variable: Tensor, value: Tensor) -> None:
        """Overwrite a variable or a parameter with a tensor of its shape and dtype."""
        variable[...] = value

    def add(self, variable: Tensor, value: Tensor) -> None:
        """Add a tensor of its shape and dtype to a variable."""
        variable += value

    def clear(self, variable: Tensor) -> None:
        """Overwrite a variable with zeros."""
        variable[...] = 0

    def number(self, value: float) -> Number:
        """Create a `Number`."""
        return Number(value)

    def when(self, condition: Scalar, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
        """Call `then` or `otherwise`, depending on a condition of one element."""
        (then if condition else otherwise)()

    # Arithmetic

    def sqrt(self, tensor: Tensor) -> Tensor:
        """The elementwise square root."""
        return tensor**0.5

    @abstractmethod
    def norm(self, tensor: Tensor) -> Tensor:
        """The Euclidean norm over all elements, as a tensor of one element and the same dtype."""

    @abstractmethod
    def where(self, condition: Tensor, if_true: Tensor, if_false: Tensor) -> Tensor:
        """`if_true` where the condition holds, else `if_false`; each argument has one element."""

    @final
    def scaled(self, tensor: Tensor, factor: Tensor) -> Tensor:
        """The tensor times a factor of one element; in the tensor's own memory where the framework can."""
        tensor *= factor if len(tensor.shape) else self.reshape(factor, ())
        return tensor

    def divided(self, tensor: Tensor, divisor: Scalar) -> Tensor:
        """The tensor over a number, or a tensor of its dtype; in its own memory where the framework can."""
        tensor /= divisor
        return tensor

    def blend(self, averages: Sequence[Tensor], values: Sequence[Tensor], kept: Scalar) -> None:
        """Overwrite each variable a with kept × a + (1 − kept) × its value."""
        for average, value in zip(averages, values, strict=True):
            share = scalar(self, kept, average)
            self.assign(average, share * average + (1 - share) * value)

    @final
    def floor(self, tensor: Tensor) -> Tensor:
        """The elementwise floor, in the same dtype, of numbers that int32 can hold."""
        toward_zero = self.cast(self.cast(tensor, "int32"), self.dtype(tensor))
        return toward_zero - self.cast(toward_zero > tensor, self.dtype(tensor))

    @final
    def zeros_like(self, like: Tensor) -> Tensor:
        """Zeros with the shape and dtype of `like`, whatever its values, also in a compiled step."""
        return self.cast(abs(like) < 0, self.dtype(like))

    def matmul(self, left: Tensor, right: Tensor) -> Tensor:
        """The product of two matrices."""
        return left @ right

    # Shapes

    def reshape(self, tensor: Tensor, shape: Sequence[int]) -> Tensor:
        """The same elements in the same order in another shape; one size may be -1 and is then inferred."""
        return tensor.reshape(tuple(shape))

    def in_order(self, tensors: Iterable[Tensor]) -> None:  # noqa: B027 - most need nothing
        """Have the elements of parameters in order in memory after an evaluation, so that parts can be taken."""

    def transpose(self, tensor: Tensor, axes: Sequence[int]) -> Tensor:
        """Permute the axes: axis i of the result is axis `axes[i]` of the tensor."""
        return tensor.transpose(tuple(axes))

    @abstractmethod
    def concat(self, tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
        """Concatenate tensors of one dtype along an axis."""

    @final
    def join(self, tensors: Sequence[Tensor]) -> Tensor:
        """Flatten tensors of one dtype and concatenate them into one vector."""
        return self.concat([self.reshape(tensor, (-1,)) for tensor in tensors])

    @final
    def joined(self, tensors: Sequence[Tensor]) -> Tensor:
        """As `join`, but a single tensor is not copied."""
        return self.join(tensors) if len(tensors) > 1 else self.reshape(tensors[0], (-1,))

    @final
    def part(self, vector: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """The inverse of `join`: split a vector into tensors of these shapes, which use all its elements."""
        parts, start = [], 0
        for shape in shapes:
            stop = start + math.prod(shape)
            parts.append(self.reshape(vector[start:stop], shape))
            start = stop
        return parts

    # For compression

    def largest(self, matrix: Tensor) -> Tensor:
        """The largest element of each row: (rows, columns) -> (rows, 1)."""
        return matrix.max(axis=1, keepdims=True)

    def top_k(self, matrix: Tensor, count: int) -> Tensor:
        """Indices of each row's `count` largest elements: (rows, columns) -> (rows, count), int32, in any order."""
        order = np.argsort(-self.to_numpy(matrix), axis=1, kind="stable")
        return self.from_numpy(order[:, :count].astype(np.int32))

    def gather(self, vector: Tensor, indices: Tensor) -> Tensor:
        """The vector's elements at `indices` (int32)."""
        return vector[indices]

    def scatter_add(self, vector: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        """The vector with `values` added at `indices` (int32, all different); may change the vector in place."""
        vector[indices] += values
        return vector

    def uniform(self, like: Tensor, seed: int) -> Tensor:
        """Random numbers in [0, 1) with the shape and dtype of `like`, determined by `seed` alone.

        `seed` is from 0 to 2^63 - 1. Frameworks may draw different numbers for the same seed.
        """
        generator = np.random.Generator(np.random.SFC64(seed))
        return self.from_numpy(generator.random(tuple(like.shape), dtype=np.dtype(self.dtype(like)).type))

    def view(self, tensor: Tensor, dtype: str) -> Tensor:
        """The elements' bytes, little-endian, as elements of another dtype; the last axis changes its length."""
        return self.from_numpy(np.ascontiguousarray(self.to_numpy(tensor)).view(dtype))


def scalar(ops: Tensors, value: Scalar, like: Tensor) -> Scalar:
    """A number, or the value of a `Number`, for arithmetic with `like`: a tensor gets its dtype."""
    return value if isinstance(value, int | float) else ops.cast(value, ops.dtype(like))
