"""Synchronized batch norm for TensorFlow (`hvdkit/core/batch_statistics.py`).

Horovod's operations are not stateful: TensorFlow merges equal ones with equal inputs, and leaves out those whose result
nobody uses, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from hvdkit.adapters.tensorflow.batch_norm import BatchNorm, OverRanks
from hvdkit.adapters.tensorflow.batch_norm import moments as local_moments
from hvdkit.core.batch_statistics import BatchStatistics, StatisticsOf
from hvdkit.core.state import canonical_name, is_statistic, layer_of
from hvdkit.core.synchronized import claims, refusal

_REMEDY = "make it a hvdkit.adapters.tensorflow.batch_norm.BatchNorm"


def synchronize_batch_norms(model: tf.Module, statistics: StatisticsOf, every: bool) -> list[str]:
    """`core.seam.Adapter.synchronize_batch_norms`, of hvdkit's `BatchNorm`; others are refused."""
    done, known = [], set()
    for layer in model.submodules:
        if isinstance(layer, BatchNorm):
            known |= {id(layer.mean), id(layer.variance)}
            if every:
                layer.over_ranks = over_ranks(statistics(layer.label))
                done.append(layer.label)
        elif claims(layer):
            raise refusal(layer.name, type(layer), "this batch norm is none of hvdkit's, and not synchronized", _REMEDY)
    for variable in model.variables if every else ():
        name = canonical_name(variable.name.removesuffix(":0"))
        if is_statistic(name) and id(variable) not in known:
            why = "these running statistics belong to a batch norm that is none of hvdkit's, and not synchronized"
            raise refusal(layer_of(name), type(variable), why, _REMEDY)
    return done


Normalized = tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]


def over_ranks(statistics: BatchStatistics | None) -> OverRanks | None:
    """What normalizes by these statistics."""
    return partial(_normalized, statistics) if statistics else None


def _normalized(
    statistics: BatchStatistics, x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float
) -> Normalized:
    fused = x.shape.rank == 4 and x.dtype != tf.float64
    return (_by_kernels if fused else _by_operations)(x, scale, offset, epsilon, statistics)


def _by_operations(
    x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float, statistics: BatchStatistics
) -> Normalized:
    wide = tf.cast(x, scale.dtype)
    center, spread, count = moments(wide, range(x.shape.rank - 1), statistics)
    y = (wide - center) * (scale / tf.sqrt(spread + epsilon)) + offset
    return tf.cast(y, x.dtype), center, spread, count


def moments(
    x: tf.Tensor, axes: Sequence[int], statistics: BatchStatistics, mask: tf.Tensor | None = None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The mean and biased variance (channels,) of all ranks' values along `axes`, which are all but one; their number.

    `mask`, True for values that count, can be broadcast to the shape of `x`; the number is then (channels,), else (1,).
    """
    axes = list(axes)
    shape = [1 if axis in axes else -1 for axis in range(x.shape.rank)]

    @tf.custom_gradient
    def compute(x: tf.Tensor) -> Any:
        if mask is None:
            mean, variance = local_moments(x, axes)
            count = tf.reshape(tf.size(x, tf.int64) // tf.size(mean, tf.int64), [1])
        else:
            count = tf.math.count_nonzero(tf.broadcast_to(mask, tf.shape(x)), axes)
            number = tf.cast(tf.maximum(count, 1), x.dtype)
            mean = tf.reduce_sum(tf.where(mask, x, 0), axes) / number
            variance = tf.reduce_sum(tf.where(mask, tf.square(x - tf.reshape(mean, shape)), 0), axes) / number
        count, mean, variance = statistics.moments(tf.cast(count, tf.float64), mean, variance)

        def backward(d_mean: tf.Tensor, d_variance: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
            d_mean, d_variance = statistics.gradients(count, d_mean, d_variance)
            dx = tf.reshape(d_mean, shape) + 2 * (x - tf.reshape(mean, shape)) * tf.reshape(d_variance, shape)
            return dx if mask is None else tf.where(mask, dx, 0)

        return (mean, variance, count), backward

    mean, variance, count = compute(x)
    return mean, variance, count


def _by_kernels(
    x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float, statistics: BatchStatistics
) -> Normalized:
    """By the fused kernels, which get the statistics as if they were constants; backward adds what these give."""

    @tf.custom_gradient
    def compute(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> Any:
        values = tf.reshape(tf.cast(tf.size(x, tf.int64) // x.shape[-1], tf.float64), [1])
        count, center, spread = statistics.moments(values, *local_moments(tf.cast(x, scale.dtype), range(3)))
        y, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale, offset=offset, mean=center, variance=spread, epsilon=epsilon, is_training=False
        )

        def backward(dy: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            wide = tf.cast(x, scale.dtype)
            dx, d_scale, d_offset, *_ = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=tf.cast(dy, scale.dtype),
                x=wide,
                scale=scale,
                reserve_space_1=center,
                reserve_space_2=spread,
                reserve_space_3=tf.zeros([0]),
                epsilon=epsilon,
                is_training=False,
            )
            by_offset, by_scale = statistics.gradients(count, d_offset, d_scale)
            root = tf.math.rsqrt(spread + epsilon)
            slope = scale * tf.square(root) * by_scale
            dx -= (wide - center) * slope + scale * root * by_offset
            return tf.cast(dx, x.dtype), d_scale, d_offset

        return (y, center, spread, count), backward

    y, center, spread, count = compute(x, scale, offset)
    return y, center, spread, count
