"""Batch norm for TensorFlow and Keras as PyTorch computes it, in every precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

# (x, scale, offset, epsilon) -> x normalized, mean, biased variance and number of values, of all ranks
OverRanks = Callable[[tf.Tensor, tf.Tensor, tf.Tensor, float], tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]]


class BatchNorm(tf.Module):
    """A batch norm for a `tf.Module`, as PyTorch computes it: the running variance is unbiased.

    `momentum` is the weight of the old running values. `dtype` is that of the variables.
    """

    over_ranks: OverRanks | None = None  # where the model's batch norms are synchronized

    def __init__(
        self, name: str, channels: int, dtype: str = "float32", *, momentum: float = 0.9, epsilon: float = 1e-5
    ) -> None:
        self.label, self.momentum, self.epsilon = name, momentum, epsilon
        zeros, ones = tf.zeros(channels, dtype), tf.ones(channels, dtype)
        self.gamma = tf.Variable(ones, name=f"{name}.gamma")
        self.beta = tf.Variable(zeros, name=f"{name}.beta")
        self.mean = tf.Variable(zeros, name=f"{name}.moving_mean", trainable=False)
        self.variance = tf.Variable(ones, name=f"{name}.moving_variance", trainable=False)

    def __call__(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        """Normalize `x` (…, channels); in training with the batch's statistics, which change the running ones."""
        y, *statistics = self.normalize(x, training)
        if training:
            self.keep(*statistics)
        return y

    def normalize(self, x: tf.Tensor, training: bool) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """The layer's output, and the new running mean and variance for `keep`."""
        parameters = self.gamma, self.beta, self.mean, self.variance
        how: Any = {"momentum": self.momentum, "epsilon": self.epsilon, "training": training}
        return batch_norm(x, *parameters, **how, over_ranks=self.over_ranks)

    def keep(self, mean: tf.Tensor, variance: tf.Tensor) -> None:
        """Assign the running mean and variance, both (channels,)."""
        self.mean.assign(mean)
        self.variance.assign(variance)


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
    over_ranks: OverRanks | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalize `x` (…, channels). Returns `x` normalized, and the new running mean and variance.

    Ioffe and Szegedy 2015, algorithm 1; the running variance is unbiased, as in their algorithm 2. `momentum` is the
    weight of the old running values. These, `scale` and `offset` are (channels,) float32, or float64 if `x` is.
    With `over_ranks` those of the batch are over all ranks. Nothing is assigned, so that activations can be computed
    again without updating the statistics twice.
    """
    if training and over_ranks is not None:
        y, center, spread, count = over_ranks(x, scale, offset, epsilon)
    elif training and x.dtype == tf.float32 and x.shape.rank == 4 and not tf.config.list_logical_devices("GPU"):
        y, center, spread = _exact(x, scale, offset, epsilon)
    elif x.dtype == tf.float64 or x.shape.rank != 4:  # the fused kernel supports neither
        wide = tf.cast(x, scale.dtype)
        center, spread = moments(wide, range(x.shape.rank - 1)) if training else (mean, variance)
        y = tf.cast((wide - center) * (scale / tf.sqrt(spread + epsilon)) + offset, x.dtype)
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
        if over_ranks is None:
            count = tf.size(x, tf.int64) / x.shape[-1]
        count = tf.cast(count, mean.dtype)
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
        center, spread = moments(x, range(3))
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


def moments(x: tf.Tensor, axes: Sequence[int]) -> tuple[tf.Tensor, tf.Tensor]:
    """The mean and the biased variance of `x` along the axes, which it loses, by sums in a tree."""
    square = tf.math.squared_difference(x, _mean(x, axes, keepdims=True))
    return _mean(x, axes), _mean(square, axes)


def _mean(x: tf.Tensor, axes: Sequence[int], keepdims: bool = False) -> tf.Tensor:
    for axis in sorted(axes, reverse=True):
        x = tf.reduce_mean(x, axis, keepdims)
    return x
