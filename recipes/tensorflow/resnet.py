"""ResNet in plain TensorFlow.

    horovodrun -np 2 python recipes/tensorflow/resnet.py recipes/resnet20-digits.yaml epochs=2

One process without a launcher works too.
"""

if __name__ == "__main__":
    from hvdkit.worker import startup

    startup.begin()  # before the framework, whose start-up it makes faster

import sys

from hvdkit.adapters import tensorflow
from hvdkit.adapters.parts import LayerParts
from hvdkit.adapters.tensorflow.batch_norm import BatchNorm
from hvdkit.adapters.tensorflow.recompute import recomputed
from hvdkit.tasks import resnet
from hvdkit.worker.entry import main

import tensorflow as tf  # isort: skip  # after the adapter, which silences TensorFlow's start-up messages


class Convolution(tf.Module):
    """A convolution in the dtype of its input."""

    def __init__(self, name: str, row: resnet.Conv, dtype: str) -> None:
        shape = (row.kernel, row.kernel, row.inputs, row.outputs)
        self.kernel = tf.Variable(tf.zeros(shape, dtype), name=f"{name}.kernel")
        self.stride, self.pad = row.stride, [[0, 0], *[[row.padding, row.padding]] * 2, [0, 0]]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        kernel = tf.cast(self.kernel, x.dtype)
        if self.stride == 1:
            return tf.nn.conv2d(x, kernel, 1, "SAME")
        # "SAME" would pad one pixel less before than after; explicit padding in conv2d itself is slow on CPUs.
        return tf.nn.conv2d(tf.pad(x, self.pad), kernel, self.stride, "VALID")


def batch_norm(name: str, channels: int, dtype: str) -> BatchNorm:
    return BatchNorm(name, channels, dtype, momentum=resnet.BN_MOMENTUM, epsilon=resnet.BN_EPSILON)


class Block(tf.Module):
    """The residual block of a table row: ReLU after each sum and between convolutions.

    Ranks divide the channels between the first two convolutions.
    """

    def __init__(self, row: resnet.ResidualBlock, table: resnet.ResNet) -> None:
        self.parts, dtype = LayerParts(tensorflow, table.tensor, row.name), table.dtype
        row = row.part(self.parts.size)
        rows = [*row.convs, *([row.projection] if row.projection else [])]
        self.convolutions = [Convolution(f"{row.name}.{r.name}", r, dtype) for r in rows]
        self.norms = [batch_norm(f"{row.name}.{r.norm}", r.outputs, dtype) for r in rows]
        self.depth, self.recompute = len(row.convs), table.recompute

    def __call__(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        def compute(x: tf.Tensor) -> list[tf.Tensor]:
            return self.compute(x, training)

        y, *statistics = (recomputed(compute) if self.recompute and training else compute)(x)
        if training:
            for norm, mean, variance in zip(self.norms, statistics[::2], statistics[1::2], strict=True):
                norm.keep(mean, variance)
        return y

    def compute(self, x: tf.Tensor, training: bool) -> list[tf.Tensor]:
        """The block's output, then each norm's mean and variance. Assigns nothing, as backward may call this again."""
        y, shortcut, statistics = self.parts.enter(x), x, []
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            projection = index == self.depth
            z = convolution(x if projection else tf.nn.relu(y) if index else y)
            result, *found = norm.normalize(self.parts.leave(z) if index == 1 else z, training)
            y, shortcut = (y, result) if projection else (result, shortcut)
            statistics += found
        return [tf.nn.relu(y + shortcut), *statistics]


class ResNet(tf.Module):
    """A model from images (n, height, width, channels) to logits (n, classes).

    Between two stages of a pipeline are features like images.
    """

    def __init__(self, table: resnet.ResNet) -> None:
        self.compute_dtype, dtype = table.compute_dtype, table.dtype
        self.is_first, self.is_last = table.is_first, table.is_last
        if self.is_first:
            self.convolution = Convolution(table.stem.name, table.stem, dtype)
            self.norm = batch_norm(table.stem.norm, table.stem.outputs, dtype)
        self.max_pool = table.max_pool
        self.blocks = [Block(row, table) for row in table.own_blocks]
        if self.is_last:
            self.kernel = tf.Variable(tf.zeros((table.features, table.classes), dtype), name="fc.kernel")
            self.bias = tf.Variable(tf.zeros(table.classes, dtype), name="fc.bias")

    @tf.autograph.experimental.do_not_convert  # nothing to convert here, and the search takes a second or more
    def __call__(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        x = tf.cast(x, self.compute_dtype)
        if self.is_first:
            x = self.features(x, training)
        for block in self.blocks:
            x = block(x, training)
        if not self.is_last:
            return x
        return tf.reduce_mean(tf.cast(x, self.kernel.dtype), [1, 2]) @ self.kernel + self.bias

    def features(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        """Of images, what the first block gets."""
        x = tf.nn.relu(self.norm(self.convolution(x), training))
        if not self.max_pool:
            return x
        # After a ReLU, padding with zeros is the same as with minus infinity.
        return tf.nn.max_pool2d(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), 3, 2, "VALID")


build = ResNet

if __name__ == "__main__":
    main(tensorflow, build, sys.argv[1:])
