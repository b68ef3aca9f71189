"""Batch norm for TensorFlow and Keras as PyTorch computes it, in every precision, over one rank or all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

if TYPE_CHECKING:
    from hvdkit.adapters.batch_statistics import BatchStatistics

Moments = tuple[tf.Tensor, tf.Tensor, tf.Tensor]  # mean, biased variance and number of values


class BatchNorm(tf.Module):
    """A batch norm for a `tf.Module`, as PyTorch computes it: the running variance is unbiased.

    `momentum` is the weight of the old running values. `dtype` is that of the variables.
    """

    over_ranks: BatchStatistics | None = None  # where the model's batch norms are synchronized

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
    over_ranks: BatchStatistics | None = None,
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Normalize `x` (…, channels). Returns `x` normalized, and the new running mean and variance.

    Ioffe and Szegedy 2015, algorithm 1; the running variance is unbiased, as in their algorithm 2. `momentum` is the
    weight of the old running values. These, `scale` and `offset` are (channels,) float32, or float64 if `x` is.
    With `over_ranks` those of the batch are over all ranks. Nothing is assigned, so that activations can be computed
    again without updating the statistics twice.
    """
    fused = x.dtype != tf.float64 and x.shape.rank == 4  # the fused kernel supports no others
    exact = x.dtype == tf.float32 and not tf.config.list_logical_devices("GPU")
    if fused and not (training and (exact or over_ranks)):
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
    if fused:
        y, center, spread, count = _by_kernels(x, scale, offset, epsilon, over_ranks)
    else:
        wide = tf.cast(x, scale.dtype)
        axes = range(x.shape.rank - 1)
        center, spread, count = moments(wide, axes, over_ranks) if training else (mean, variance, None)
        y = tf.cast((wide - center) * (scale / tf.sqrt(spread + epsilon)) + offset, x.dtype)
    if training:
        kept, new = tf.constant(momentum, mean.dtype), tf.constant(1 - momentum, mean.dtype)
        mean = kept * mean + new * center
        variance = kept * variance + new * (spread * _unbiased(count, mean.dtype))
    return y, tf.stop_gradient(mean), tf.stop_gradient(variance)


def _by_kernels(
    x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float, over_ranks: BatchStatistics | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor]:
    """The normalized `x`, and the moments of the batch, as exact as PyTorch's on a CPU.

    TensorFlow's fused CPU kernel sums one value after the other. The errors of its mean and variance are about 20 times
    as large, 3,000 times in an image that is mostly background, and so are those of a model's logits, since they affect
    whole channels (benchmarks/batch_norm.md). Here it computes the moments of each pixel over the images, and those
    of a channel follow. Backward is the fused kernel's, with these moments in place of the values that its forward pass
    would save. Over all ranks, they are constants for it, and what they add to the gradient comes after it.
    """

    @tf.custom_gradient
    def normalized(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor) -> Any:
        wide = tf.cast(x, scale.dtype)
        center, spread, count = _image_moments(wide)
        if over_ranks:
            count, center, spread = over_ranks.moments(count, center, spread)
        y = tf.cast(_normalized(wide, center, scale * tf.math.rsqrt(spread + epsilon), offset), x.dtype)

        def backward(dy: tf.Tensor, *_: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
            wide = tf.cast(x, scale.dtype)
            dx, d_scale, d_offset, *_ = tf.raw_ops.FusedBatchNormGradV3(
                y_backprop=tf.cast(dy, scale.dtype),
                x=wide,
                scale=scale,
                reserve_space_1=center,
                reserve_space_2=spread,
                reserve_space_3=tf.constant([], tf.float32),
                epsilon=epsilon,
                is_training=not over_ranks,
            )
            if over_ranks:
                by_offset, by_scale = over_ranks.gradients(count, d_offset, d_scale)
                root = tf.math.rsqrt(spread + epsilon)
                slope = scale * tf.square(root) * by_scale
                dx -= (wide - center) * slope + scale * root * by_offset
            return tf.cast(dx, x.dtype), d_scale, d_offset

        return (y, center, spread, *((count,) if over_ranks else ())), backward

    y, center, spread, *counts = normalized(x, scale, offset)
    return y, center, spread, counts[0] if counts else _count(x, center)


def moments(
    x: tf.Tensor, axes: Sequence[int], over_ranks: BatchStatistics | None = None, mask: tf.Tensor | None = None
) -> Moments:
    """The moments (channels,) of `x` along `axes`, which are all but one: of this rank's values, or of all ranks'.

    `mask`, True for values that count, can be broadcast to the shape of `x`; the number is then (channels,), else (1,).
    """
    if not over_ranks:
        return _own_moments(x, axes)
    shape = [1 if axis in axes else -1 for axis in range(x.shape.rank)]

    @tf.custom_gradient
    def compute(x: tf.Tensor) -> Any:
        if mask is None:
            mean, variance, count = _own_moments(x, axes)
        else:
            count = tf.math.count_nonzero(tf.broadcast_to(mask, tf.shape(x)), axes)
            number = tf.cast(tf.maximum(count, 1), x.dtype)
            mean = tf.reduce_sum(tf.where(mask, x, 0), axes) / number
            variance = tf.reduce_sum(tf.where(mask, tf.square(x - tf.reshape(mean, shape)), 0), axes) / number
        count, mean, variance = over_ranks.moments(tf.cast(count, tf.float64), mean, variance)

        def backward(d_mean: tf.Tensor, d_variance: tf.Tensor, *_: tf.Tensor) -> tf.Tensor:
            d_mean, d_variance = over_ranks.gradients(count, d_mean, d_variance)
            dx = tf.reshape(d_mean, shape) + 2 * (x - tf.reshape(mean, shape)) * tf.reshape(d_variance, shape)
            return dx if mask is None else tf.where(mask, dx, 0)

        return (mean, variance, count), backward

    mean, variance, count = compute(x)
    return mean, variance, count


def _image_moments(x: tf.Tensor) -> Moments:
    """Those of this rank's `x` (n, height, width, channels), from those of each pixel (Chan et al. 1979).

    The kernel then adds up few values at a time, and errors are nearly as small as those of sums in a tree.
    """
    if not x.shape.is_fully_defined():
        return _own_moments(x, range(3))
    images, height, width, channels = x.shape
    together = next((number for number in range(16, 7, -1) if images % number == 0), images)
    height *= images // together  # the others are one picture, the rows of which continue
    size = height * width * channels
    pixels, none = tf.reshape(x, [together, 1, 1, size]), tf.constant([], x.dtype)
    _, means, variances, *_ = tf.raw_ops.FusedBatchNormV3(
        x=pixels,
        scale=tf.ones(size, x.dtype),
        offset=tf.zeros(size, x.dtype),
        mean=none,
        variance=none,
        is_training=True,
    )
    biased = tf.constant(1 - 1 / together, x.dtype)
    within = tf.math.multiply_no_nan(variances, biased)  # the kernel's are unbiased: NaN for one image

    def mean(values: tf.Tensor) -> tf.Tensor:
        rows = tf.reduce_mean(tf.reshape(values, [height, width * channels]), 0)
        return tf.reduce_mean(tf.reshape(rows, [width, channels]), 0)

    center = mean(means)
    between = tf.math.squared_difference(means, tf.tile(center, [height * width]))
    return center, mean(within + between), _count(x, center)


def _normalized(x: tf.Tensor, center: tf.Tensor, slope: tf.Tensor, offset: tf.Tensor) -> tf.Tensor:
    """(`x` - `center`) × `slope` + `offset`, of `x` (…, width, channels) and vectors (channels,).

    A row of pixels at a time where the width is known, because few channels are broadcast slowly.
    """
    width = x.shape[-2] or 1
    rows = tf.reshape(x, [-1, width * x.shape[-1]])
    center, slope, offset = (tf.tile(vector, [width]) for vector in (center, slope, offset))
    return tf.reshape((rows - center) * slope + offset, tf.shape(x))


def _own_moments(x: tf.Tensor, axes: Sequence[int]) -> Moments:
    """Those of this rank's values, by sums in a tree."""
    order, every = [tf.constant(axis) for axis in sorted(axes, reverse=True)], tf.constant([-1])
    mean = _mean(x, order)
    variance = _mean(tf.math.squared_difference(x, mean), order)
    return tf.reshape(mean, every), tf.reshape(variance, every), _count(x, mean)


def _count(x: tf.Tensor, mean: tf.Tensor) -> tf.Tensor:
    """The number of values of each channel (1,), a constant where the shape is known when the step is traced."""
    if x.shape.is_fully_defined():
        return tf.constant([x.shape.num_elements() / mean.shape.num_elements()], tf.float64)
    return tf.reshape(tf.cast(tf.size(x, tf.int64) // tf.size(mean, tf.int64), tf.float64), [1])


def _mean(x: tf.Tensor, axes: Sequence[tf.Tensor]) -> tf.Tensor:
    for axis in axes:
        x = tf.reduce_mean(x, axis, keepdims=True)
    return x


def _unbiased(count: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """n / (n - 1) of a number of values; a constant where it is known when the step is traced."""
    known = tf.get_static_value(count)
    if known is not None:
        with np.errstate(divide="ignore"):
            return tf.constant(known / (known - 1), dtype)
    count = tf.cast(count, dtype)
    return count / (count - 1)
