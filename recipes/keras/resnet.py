"""ResNet in Keras 3 (on TensorFlow), trained by `model.fit`.

    horovodrun -np 2 python recipes/keras/resnet.py recipes/resnet20-digits.yaml epochs=2

One process without a launcher works too.
"""

if __name__ == "__main__":
    from hvdkit.worker import startup

    startup.begin()  # before the framework, whose start-up it makes faster

import sys

from hvdkit.adapters import keras as adapter
from hvdkit.adapters.parts import LayerParts
from hvdkit.adapters.tensorflow.batch_norm import batch_norm
from hvdkit.tasks import resnet
from hvdkit.worker.entry import main

import keras  # isort: skip  # after the adapter, which silences TensorFlow's start-up messages
import tensorflow as tf  # isort: skip
from keras import layers  # isort: skip


# Convolutions and activations compute in `compute_dtype`, while variables are in `dtype`.
POLICIES = {"float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}


class Convolution(layers.Conv2D):
    """Pads both sides equally; with stride 2, Keras's "same" pads one pixel less before than after."""

    def __init__(self, row: resnet.Conv, policy: str):
        padding = "same" if row.stride == 1 else "valid"
        super().__init__(row.outputs, row.kernel, row.stride, padding, use_bias=False, name=row.name, dtype=policy)
        self.pad = [[0, 0], *[[row.padding if row.stride > 1 else 0] * 2] * 2, [0, 0]]

    def call(self, x):
        return super().call(tf.pad(x, self.pad) if self.pad[1][0] else x)


class BatchNorm(layers.BatchNormalization):
    """Batch norm with an unbiased running variance, as in PyTorch; Keras's own is biased."""

    over_ranks = None  # normalizes over all ranks, with `model.batch_norm: synchronized`

    def __init__(self, row: resnet.Conv, policy: str):
        super().__init__(momentum=resnet.BN_MOMENTUM, epsilon=resnet.BN_EPSILON, name=row.norm, dtype=policy)

    def call(self, x, training=None, mask=None):
        y, *statistics = self.normalize(x, training)
        if training:
            self.keep(*statistics)
        return y

    def normalize(self, x, training):
        """The layer's output, and the new running mean and variance for `keep`."""
        parameters = self.gamma, self.beta, self.moving_mean, self.moving_variance
        parameters = [tf.convert_to_tensor(parameter) for parameter in parameters]
        how = {"momentum": self.momentum, "epsilon": self.epsilon, "training": bool(training)}
        return batch_norm(x, *parameters, **how, over_ranks=self.over_ranks)

    def keep(self, mean, variance):
        """Assign the running mean and variance, both (channels,)."""
        self.moving_mean.assign(mean)
        self.moving_variance.assign(variance)


class Block(layers.Layer):
    """The residual block of a table row: ReLU after each sum and between convolutions.

    Ranks divide the channels between the first two convolutions.
    """

    def __init__(self, row: resnet.ResidualBlock, table: resnet.ResNet, policy: str):
        super().__init__(name=row.name, dtype=policy)
        self.parts = LayerParts(adapter, table.tensor, row.name)
        row = row.part(self.parts.size)
        self.rows = [*row.convs, *([row.projection] if row.projection else [])]
        self.convolutions = [Convolution(r, policy) for r in self.rows]
        self.norms = [BatchNorm(r, policy) for r in self.rows]
        self.depth, self.recompute = len(row.convs), table.recompute

    def build(self, shape):
        for row, convolution, norm in zip(self.rows, self.convolutions, self.norms, strict=True):
            convolution.build((None, None, None, row.inputs))
            norm.build((None, None, None, row.outputs))

    def call(self, x, training=None):
        def compute(x):
            return self.compute(x, training)

        y, *statistics = (tf.recompute_grad(compute) if self.recompute and training else compute)(x)
        if training:
            for norm, mean, variance in zip(self.norms, statistics[::2], statistics[1::2], strict=True):
                norm.keep(mean, variance)
        return y

    def compute(self, x, training):
        """The block's output, then each norm's mean and variance. Assigns nothing, as backward may call this again."""
        y, shortcut, statistics = self.parts.enter(x), x, []
        for index, (convolution, norm) in enumerate(zip(self.convolutions, self.norms, strict=True)):
            projection = index == self.depth
            z = convolution(x if projection else tf.nn.relu(y) if index else y)
            result, *found = norm.normalize(self.parts.leave(z) if index == 1 else z, training)
            y, shortcut = (y, result) if projection else (result, shortcut)
            statistics += found
        return [tf.nn.relu(y + shortcut), *statistics]


def build(table: resnet.ResNet) -> keras.Model:
    """A model from images (n, height, width, channels) to logits (n, classes); between two stages of a pipeline are
    features like images."""
    policy, rows = POLICIES.get(table.compute_dtype, table.dtype), table.own_blocks
    if table.is_first:
        inputs = keras.Input((None, None, table.stem.inputs))
        x = layers.ReLU(dtype=policy)(BatchNorm(table.stem, policy)(Convolution(table.stem, policy)(inputs)))
        if table.max_pool:  # after a ReLU, padding with zeros is the same as with minus infinity
            x = layers.MaxPooling2D(3, 2, dtype=policy)(layers.ZeroPadding2D(1, dtype=policy)(x))
    else:
        x = inputs = keras.Input((None, None, rows[0].convs[0].inputs), dtype=table.dtype)
    for row in rows:
        x = Block(row, table, policy)(x)
    if table.is_last:
        x = layers.GlobalAveragePooling2D(dtype=table.dtype)(x)
        x = layers.Dense(table.classes, name="fc", dtype=table.dtype)(x)
    return keras.Model(inputs, x, name=table.name)


if __name__ == "__main__":
    main(adapter, build, sys.argv[1:])
