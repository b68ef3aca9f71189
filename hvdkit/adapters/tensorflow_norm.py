"""Batch norm for TensorFlow and Keras as PyTorch computes it, in every precision."""

from __future__ import annotations

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
    """Normalize `x` (n, height, width, channels): `x` in its dtype, and what the running mean and variance become.

    `momentum` is their old values' share. They and `scale` and `offset` are float32, or float64 where `x` is.
    Nothing is assigned, so that a pass which computes again what has been computed changes nothing.
    """
    if x.dtype != tf.float64:
        # The raw operation, as tf.nn's raises the epsilon to 1.001e-5; its variance is unbiased, as in PyTorch.
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
    center, spread = tf.nn.moments(x, [0, 1, 2]) if training else (mean, variance)
    y = (x - center) * (scale / tf.sqrt(spread + epsilon)) + offset
    if training:
        count = tf.cast(tf.size(x, tf.int64) / x.shape[-1], x.dtype)
        mean = momentum * mean + (1 - momentum) * center
        variance = momentum * variance + (1 - momentum) * spread * (count / (count - 1))
    return y, tf.stop_gradient(mean), tf.stop_gradient(variance)
