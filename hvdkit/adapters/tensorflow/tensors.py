"""TensorFlow's tensor operations (`hvdkit/core/tensors.py`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from hvdkit.core.tensors import Number, Scalar, Tensors


class _Number(Number):
    """A float64 variable that is not differentiated."""

    def __init__(self, value: float) -> None:
        self._variable = tf.Variable(value, trainable=False, dtype=tf.float64)

    def get(self) -> tf.Tensor:
        return self._variable.value()

    def set(self, value: Scalar) -> None:
        self._variable.assign(value)


class TensorFlowTensors(Tensors):
    """Eager, and traced into a graph."""

    from_numpy = staticmethod(tf.constant)
    cast = staticmethod(tf.cast)
    sqrt = staticmethod(tf.sqrt)
    norm = staticmethod(tf.norm)
    where = staticmethod(tf.where)
    reshape = staticmethod(tf.reshape)
    gather = staticmethod(tf.gather)

    def variable(self, like: tf.Tensor) -> tf.Variable:
        return tf.Variable(tf.zeros_like(like), trainable=False)

    def assign(self, variable: tf.Variable, value: tf.Tensor) -> None:
        variable.assign(value)

    def add(self, variable: tf.Variable, value: tf.Tensor) -> None:
        variable.assign_add(value)

    def clear(self, variable: tf.Variable) -> None:
        variable.assign(tf.zeros_like(variable))

    def divided(self, tensor: tf.Tensor, divisor: Scalar) -> tf.Tensor:
        return tensor / divisor

    def number(self, value: float) -> Number:
        return _Number(value)

    def when(self, condition: tf.Tensor, then: Callable[[], None], otherwise: Callable[[], None]) -> None:
        def done(branch: Callable[[], None]) -> tf.Tensor:
            branch()
            return tf.constant(True)

        tf.cond(tf.reshape(condition, ()), lambda: done(then), lambda: done(otherwise))

    def transpose(self, tensor: tf.Tensor, axes: Sequence[int]) -> tf.Tensor:
        return tf.transpose(tensor, tuple(axes))

    def concat(self, tensors: Sequence[tf.Tensor], axis: int = 0) -> tf.Tensor:
        return tf.concat(list(tensors), axis)

    def largest(self, matrix: tf.Tensor) -> tf.Tensor:
        return tf.reduce_max(matrix, axis=1, keepdims=True)

    def top_k(self, matrix: tf.Tensor, count: int) -> tf.Tensor:
        return tf.math.top_k(matrix, count, sorted=False).indices

    def scatter_add(self, vector: tf.Tensor, indices: tf.Tensor, values: tf.Tensor) -> tf.Tensor:
        return tf.tensor_scatter_nd_add(vector, tf.expand_dims(indices, 1), values)

    def uniform(self, like: tf.Tensor, seed: int) -> tf.Tensor:
        return tf.random.stateless_uniform(like.shape, seed=(seed & 0x7FFFFFFF, seed >> 31), dtype=like.dtype)
