"""TensorFlow's tensor operations (`hvdkit/core/tensors.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf


def variable(like: Any) -> tf.Variable:
    return tf.Variable(tf.zeros_like(like), trainable=False)


def assign(variable: tf.Variable, value: tf.Tensor) -> None:
    variable.assign(value)


class _Number:
    """A float64 variable that is not differentiated."""

    def __init__(self, value: float) -> None:
        self._variable = tf.Variable(value, trainable=False, dtype=tf.float64)

    def get(self) -> tf.Tensor:
        return self._variable.value()

    def set(self, value: Any) -> None:
        self._variable.assign(value)


def number(value: float) -> _Number:
    return _Number(value)


def when(condition: tf.Tensor, then: Callable[[], Any], otherwise: Callable[[], Any]) -> None:
    def done(branch: Callable[[], Any]) -> tf.Tensor:
        branch()
        return tf.constant(True)

    tf.cond(tf.reshape(condition, ()), lambda: done(then), lambda: done(otherwise))


def transpose(tensor: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
    return tf.transpose(tensor, tuple(axes))


def sqrt(tensor: tf.Tensor) -> tf.Tensor:
    return tf.sqrt(tensor)


def norm(tensor: tf.Tensor) -> tf.Tensor:
    return tf.norm(tensor)


def where(condition: tf.Tensor, if_true: tf.Tensor, if_false: tf.Tensor) -> tf.Tensor:
    return tf.where(condition, if_true, if_false)


def scaled(tensor: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    return tensor * tf.reshape(factor, ())


def blend(averages: Sequence[tf.Variable], values: Sequence[Any], kept: Any) -> None:
    for average, value in zip(averages, values, strict=True):
        share = tf.cast(kept, average.dtype)
        average.assign(share * average + (1 - share) * value)


def reshape(tensor: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
    return tf.reshape(tensor, tuple(shape))


def concat(tensors: Sequence[tf.Tensor], axis: int = 0) -> tf.Tensor:
    return tf.concat(list(tensors), axis)


def join(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    if _on_cpu(tensors[0]):
        return tf.convert_to_tensor(np.concatenate([tensor.numpy().reshape(-1) for tensor in tensors]))
    return tf.concat([tf.reshape(tensor, (-1,)) for tensor in tensors], 0)


def part(vector: tf.Tensor, shapes: Sequence[Sequence[int]]) -> list[tf.Tensor]:
    sizes = [math.prod(shape) for shape in shapes]
    if _on_cpu(vector):
        parts = np.split(vector.numpy(), np.cumsum(sizes)[:-1])
        return [tf.convert_to_tensor(part.reshape(shape)) for part, shape in zip(parts, shapes, strict=True)]
    return [tf.reshape(part, shape) for part, shape in zip(tf.split(vector, sizes), shapes, strict=True)]


def _on_cpu(tensor: tf.Tensor) -> bool:
    """Whether NumPy can read its memory, which takes a tenth of the time of one operation for each tensor."""
    return tf.executing_eagerly() and "GPU" not in tensor.device


def floor(tensor: tf.Tensor) -> tf.Tensor:
    return tf.floor(tensor)


def largest(matrix: tf.Tensor) -> tf.Tensor:
    return tf.reduce_max(matrix, axis=1, keepdims=True)


def top_k(matrix: tf.Tensor, count: int) -> tf.Tensor:
    return tf.math.top_k(matrix, count, sorted=False).indices


def gather(vector: tf.Tensor, indices: tf.Tensor) -> tf.Tensor:
    return tf.gather(vector, indices)


def scatter_add(vector: tf.Tensor, indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
    return tf.tensor_scatter_nd_add(vector, tf.expand_dims(indices, 1), values)


def matmul(left: tf.Tensor, right: tf.Tensor, transpose_left: bool = False, transpose_right: bool = False) -> tf.Tensor:
    return tf.matmul(left, right, transpose_a=transpose_left, transpose_b=transpose_right)


def uniform(like: tf.Tensor, seed: int) -> tf.Tensor:
    return tf.random.stateless_uniform(like.shape, seed=(seed & 0x7FFFFFFF, seed >> 31), dtype=like.dtype)


def to_bytes(tensor: tf.Tensor) -> tf.Tensor:
    spread = tf.bitcast(tensor, tf.uint8)  # with an additional axis for each element's bytes
    return tf.reshape(spread, (*tensor.shape[:-1], tensor.shape[-1] * spread.shape[-1]))


def from_bytes(tensor: tf.Tensor, dtype: str) -> tf.Tensor:
    size = tf.as_dtype(dtype).size
    return tf.bitcast(tf.reshape(tensor, (*tensor.shape[:-1], tensor.shape[-1] // size, size)), dtype)
