"""NumPy's tensor operations (`hvdkit/core/tensors.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdkit.core.tensors import PlainNumber


def variable(like: np.ndarray) -> np.ndarray:
    return np.zeros_like(like)


def assign(variable: np.ndarray, value: np.ndarray) -> None:
    variable[...] = value


def number(value: float) -> PlainNumber:
    return PlainNumber(value)


def when(condition: np.ndarray, then: Callable[[], Any], otherwise: Callable[[], Any]) -> None:
    (then if condition else otherwise)()


def transpose(tensor: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    return tensor.transpose(tuple(axes))


def sqrt(tensor: np.ndarray) -> np.ndarray:
    return np.asarray(np.sqrt(tensor))


def norm(tensor: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.norm(tensor))


def where(condition: np.ndarray, if_true: np.ndarray, if_false: np.ndarray) -> np.ndarray:
    return np.where(condition, if_true, if_false)


def scaled(tensor: np.ndarray, factor: np.ndarray) -> np.ndarray:
    scaled: np.ndarray = tensor * factor
    return scaled


def blend(averages: Sequence[np.ndarray], values: Sequence[np.ndarray], kept: float) -> None:
    for average, value in zip(averages, values, strict=True):
        average[...] = kept * average + (1 - kept) * value


def reshape(tensor: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    return tensor.reshape(tuple(shape))


def concat(tensors: Sequence[np.ndarray], axis: int = 0) -> np.ndarray:
    return np.concatenate(tensors, axis)


def join(tensors: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([tensor.reshape(-1) for tensor in tensors])


def part(vector: np.ndarray, shapes: Sequence[Sequence[int]]) -> list[np.ndarray]:
    pieces = np.split(vector, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return [piece.reshape(tuple(shape)) for piece, shape in zip(pieces, shapes, strict=True)]


def floor(tensor: np.ndarray) -> np.ndarray:
    return np.asarray(np.floor(tensor))


def largest(matrix: np.ndarray) -> np.ndarray:
    return np.asarray(matrix.max(axis=1, keepdims=True))


def top_k(matrix: np.ndarray, count: int) -> np.ndarray:
    return np.argsort(-matrix, axis=1, kind="stable")[:, :count].astype(np.int32)


def gather(vector: np.ndarray, indices: np.ndarray) -> np.ndarray:
    return np.asarray(vector[indices])


def scatter_add(vector: np.ndarray, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
    vector[indices] += values
    return vector


def matmul(
    left: np.ndarray, right: np.ndarray, transpose_left: bool = False, transpose_right: bool = False
) -> np.ndarray:
    return np.asarray((left.T if transpose_left else left) @ (right.T if transpose_right else right))


def uniform(like: np.ndarray, seed: int) -> np.ndarray:
    return np.random.Generator(np.random.SFC64(seed)).random(like.shape, dtype=like.dtype)


def to_bytes(tensor: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(tensor).view(np.uint8)


def from_bytes(tensor: np.ndarray, dtype: str) -> np.ndarray:
    return np.ascontiguousarray(tensor).view(dtype)
