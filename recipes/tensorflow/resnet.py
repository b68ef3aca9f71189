"""ResNet in plain TensorFlow.

    horovodrun -np 2 python recipes/tensorflow/resnet.py recipes/resnet20-digits.yaml epochs=2

One process without a launcher works too.
"""

import sys

from hvdkit.adapters import tensorflow
from hvdkit.core import resnet
from hvdkit.core.main import main

import tensorflow as tf  # isort: skip  # after the adapter, which quiets TensorFlow's banner


class Convolution(tf.Module):
    def __init__(self, name: str, row: resnet.Conv) -> None:
        self.kernel = tf.Variable(tf.zeros((row.kernel, row.kernel, row.inputs, row.outputs)), name=f"{name}.kernel")
        self.stride, self.pad = row.stride, [[0, 0], *[[row.padding, row.padding]] * 2, [0, 0]]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        if self.stride == 1:
            return tf.nn.conv2d(x, self.kernel, 1, "SAME")
        # Here "SAME" would pad one pixel less before than behind; explicit paddings in conv2d itself are slow on CPUs.
        return tf.nn.conv2d(tf.pad(x, self.pad), self.kernel, self.stride, "VALID")


class BatchNorm(tf.Module):
    def __init__(self, name: str, channels: int) -> None:
        self.gamma = tf.Variable(tf.ones(channels), name=f"{name}.gamma")
        self.beta = tf.Variable(tf.zeros(channels), name=f"{name}.beta")
        self.mean = tf.Variable(tf.zeros(channels), name=f"{name}.moving_mean", trainable=False)
        self.variance = tf.Variable(tf.ones(channels), name=f"{name}.moving_variance", trainable=False)

    def __call__(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        # The raw operation, as tf.nn's raises the epsilon to 1.001e-5; its variance is unbiased, as in PyTorch.
        y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=self.gamma,
            offset=self.beta,
            mean=self.mean,
            variance=self.variance,
            epsilon=resnet.BN_EPSILON,
            exponential_avg_factor=1 - resnet.BN_MOMENTUM,
            is_training=training,
        )
        if training:
            self.mean.assign(mean)
            self.variance.assign(variance)
        return y


class Block(tf.Module):
    def __init__(self, row: resnet.Block) -> None:
        rows = [*row.convs, *([row.projection] if row.projection else [])]
        layers = [(Convolution(f"{row.name}.{r.name}", r), BatchNorm(f"{row.name}.{r.norm}", r.outputs)) for r in rows]
        self.path, self.projection = layers[: len(row.convs)], layers[len(row.convs) :]

    def __call__(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        y, shortcut = x, x
        for index, (convolution, norm) in enumerate(self.path):
            y = norm(convolution(tf.nn.relu(y) if index else y), training)
        for convolution, norm in self.projection:
            shortcut = norm(convolution(x), training)
        return tf.nn.relu(y + shortcut)


class ResNet(tf.Module):
    def __init__(self, table: resnet.ResNet) -> None:
        self.convolution = Convolution(table.stem.name, table.stem)
        self.norm = BatchNorm(table.stem.norm, table.stem.outputs)
        self.max_pool = table.max_pool
        self.blocks = [Block(row) for row in table.blocks]
        self.kernel = tf.Variable(tf.zeros((table.features, table.classes)), name="fc.kernel")
        self.bias = tf.Variable(tf.zeros(table.classes), name="fc.bias")

    def __call__(self, x: tf.Tensor, training: bool) -> tf.Tensor:
        x = tf.nn.relu(self.norm(self.convolution(x), training))
        if self.max_pool:  # zeros are as good as minus infinity behind a ReLU
            x = tf.nn.max_pool2d(tf.pad(x, [[0, 0], [1, 1], [1, 1], [0, 0]]), 3, 2, "VALID")
        for block in self.blocks:
            x = block(x, training)
        return tf.reduce_mean(x, [1, 2]) @ self.kernel + self.bias


build = ResNet

if __name__ == "__main__":
    main(tensorflow, build, sys.argv[1:])
