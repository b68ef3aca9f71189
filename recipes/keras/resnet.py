"""ResNet in Keras 3 (on TensorFlow), trained by `model.fit`.

    horovodrun -np 2 python recipes/keras/resnet.py recipes/resnet20-digits.yaml epochs=2

One process without a launcher works too.
"""

import sys

from hvdkit.adapters import keras as adapter
from hvdkit.core import resnet
from hvdkit.core.main import main

import keras  # isort: skip  # after the adapter, which quiets TensorFlow's banner
import tensorflow as tf  # isort: skip
from keras import layers  # isort: skip


class BatchNorm(layers.BatchNormalization):
    """Keras's own keeps a biased running variance; the fused kernel's is unbiased, as in PyTorch."""

    def call(self, inputs, training=None, mask=None):
        y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
            x=inputs,
            scale=self.gamma,
            offset=self.beta,
            mean=self.moving_mean,
            variance=self.moving_variance,
            epsilon=self.epsilon,
            exponential_avg_factor=1 - self.momentum,
            is_training=bool(training),
        )
        if training:
            self.moving_mean.assign(mean)
            self.moving_variance.assign(variance)
        return y


def normalized(x, prefix: str, row: resnet.Conv):
    """A convolution and its batch norm."""
    if row.stride > 1 and row.padding:  # "same" would pad one pixel less before than behind
        x = layers.ZeroPadding2D(row.padding)(x)
    padding = "same" if row.stride == 1 else "valid"
    x = layers.Conv2D(row.outputs, row.kernel, row.stride, padding=padding, use_bias=False, name=prefix + row.name)(x)
    return BatchNorm(momentum=resnet.BN_MOMENTUM, epsilon=resnet.BN_EPSILON, name=prefix + row.norm)(x)


def build(table: resnet.ResNet) -> keras.Model:
    channels = table.stem.inputs
    images = x = keras.Input((None, None, channels))
    x = layers.ReLU()(normalized(x, "", table.stem))
    if table.max_pool:  # zeros are as good as minus infinity behind a ReLU
        x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    for row in table.blocks:
        y = x
        for index, conv in enumerate(row.convs):
            y = normalized(layers.ReLU()(y) if index else y, f"{row.name}.", conv)
        shortcut = normalized(x, f"{row.name}.", row.projection) if row.projection else x
        x = layers.ReLU()(layers.Add()([y, shortcut]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(images, layers.Dense(table.classes, name="fc")(x), name=table.name)


if __name__ == "__main__":
    main(adapter, build, sys.argv[1:])
