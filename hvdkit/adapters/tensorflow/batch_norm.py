"""Batch norm for TensorFlow and Keras as PyTorch computes it, in every precision."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def batch_norm(
    x: tf.Tensor,
    scale: tf.Tensor,
    offset: tf.Tensor,
    mean: tf.Tensor,
    variance: tf.Tensor,
    *,
    momentum: float,
    epsilon: float,
    training: bool,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalize `x` (n, height, width, channels). Returns `x` normalized, and the new running mean and variance.

    Ioffe and Szegedy 2015, algorithm 1; the running variance is unbiased, as in their algorithm 2. `momentum` is the
    weight of the old running values. These, `scale` and `offset` are (channels,) float32, or float64 if `x` is.
    Nothing is assigned, so that activations can be computed again without updating the statistics twice.
    """
    if training and x.dtype == tf.float32 and not tf.config.list_logical_devices("GPU"):
        y, center, spread = _exact(x, scale, offset, epsilon)
    elif x.dtype == tf.float64:  # the fused kernel does not support float64
        center, spread = tf.nn.moments(x, [0, 1, 2]) if training else (mean, variance)
        y = (x - center) * (scale / tf.sqrt(spread + epsilon)) + offset
    else:
        # The raw operation, because tf.nn's raises epsilon to 1.001e-5. Its variance is unbiased, as in PyTorch.
        y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=scale,
            offset=offset,
            mean=mean,
            variance=variance,
            epsilon=epsilon,
            exponential_avg_factor=1 - momentum,
            is_training=training,
        )
        return y, mean, variance
    if training:
        count = tf.cast(tf.size(x, tf.int64) / x.shape[-1], x.dtype)
        mean = momentum * mean + (1 - momentum) * center
        variance = momentum * variance + (1 - momentum) * spread * (count / (count - 1))
    return y, tf.stop_gradient(mean), tf.stop_gradient(variance)


def _exact(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The normalized `x`, and the batch's mean and biased variance, as exact as PyTorch's on a CPU.

    TensorFlow's fused CPU kernel sums one value after the other. The errors of its mean and variance are about 20 times
    as large, and so are those of a model's logits, since they affect whole channels. Here sums are taken axis by
    axis, which is effectively a tree. The fused kernels do the rest; the backward kernel gets the mean and variance in
    place of the values that the forward kernel would save.
    """

    @tf.custom_gradient
    def normalized(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> Any:
        center = _mean(x)
        spread = _mean(tf.math.squared_difference(x, center))
        y, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x, scale=scale, offset=offset, mean=center, variance=spread, epsilon=epsilon, is_training=False
        )

        def backward(dy: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            dx, d_scale, d_offset, *_ = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=dy,
                x=x,
                scale=scale,
                reserve_space_1=center,
                reserve_space_2=spread,
                reserve_space_3=tf.zeros([0]),
                epsilon=epsilon,
                is_training=True,
            )
            return dx, d_scale, d_offset

        return (y, center, spread), backward

    y, center, spread = normalized(x, scale, offset)
    return y, center, spread


def _mean(x: tf.Tensor) -> tf.Tensor:
    for axis in (2, 1, 0):
        x = tf.reduce_mean(x, axis)
    return x
