"""ResNet-20 on the digits in TensorFlow with Horovod, by hand: what hvdkit is measured against.

python benchmarks/plain/resnet_tensorflow.py --epochs 2
horovodrun -np 2 python benchmarks/plain/resnet_tensorflow.py --epochs 2 --horovod
"""

import numpy as np
import shared
import tensorflow as tf

hvd = shared.horovod("horovod.tensorflow")


class ConvNorm(tf.Module):
    """A convolution and its batch norm, by the fused kernel."""

    def __init__(self, inputs, outputs, kernel, stride):
        deviation = (2 / (kernel * kernel * outputs)) ** 0.5
        self.kernel = tf.Variable(tf.random.normal((kernel, kernel, inputs, outputs), stddev=deviation))
        self.gamma, self.beta = tf.Variable(tf.ones(outputs)), tf.Variable(tf.zeros(outputs))
        self.mean = tf.Variable(tf.zeros(outputs), trainable=False)
        self.variance = tf.Variable(tf.ones(outputs), trainable=False)
        self.stride, self.pad = stride, kernel // 2

    def __call__(self, x, training):
        if self.stride == 1:
            x = tf.nn.conv2d(x, self.kernel, 1, "SAME")
        else:  # "SAME" is asymmetric here, and explicit paddings in conv2d are slow on CPUs
            x = tf.pad(x, [[0, 0], [self.pad, self.pad], [self.pad, self.pad], [0, 0]])
            x = tf.nn.conv2d(x, self.kernel, self.stride, "VALID")
        state = (self.gamma, self.beta, self.mean, self.variance)
        y, mean, variance = tf.compat.v1.nn.fused_batch_norm(
            x, *state, 1.001e-5, is_training=training, exponential_avg_factor=0.1
        )
        if training:
            self.mean.assign(mean)
            self.variance.assign(variance)
        return y


class Block(tf.Module):
    def __init__(self, inputs, outputs, stride):
        self.first, self.second = ConvNorm(inputs, outputs, 3, stride), ConvNorm(outputs, outputs, 3, 1)
        self.shortcut = ConvNorm(inputs, outputs, 1, stride) if stride != 1 else None

    def __call__(self, x, training):
        y = self.second(tf.nn.relu(self.first(x, training)), training)
        return tf.nn.relu(y + (self.shortcut(x, training) if self.shortcut else x))


class ResNet20(tf.Module):
    def __init__(self, classes=10):
        self.stem = ConvNorm(3, 16, 3, 1)
        widths, strides = [16] * 3 + [32] * 3 + [64] * 3, [1, 1, 1, 2, 1, 1, 2, 1, 1]
        self.blocks = list(map(Block, [16, *widths], widths, strides))
        self.weight = tf.Variable(tf.random.normal((64, classes), stddev=0.01))
        self.bias = tf.Variable(tf.zeros(classes))

    def __call__(self, x, training):
        x = tf.nn.relu(self.stem(x, training))
        for block in self.blocks:
            x = block(x, training)
        return tf.reduce_mean(x, [1, 2]) @ self.weight + self.bias


def main():
    args = shared.options()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    tf.random.set_seed(1)
    (images, labels), (val_images, val_labels) = shared.digits()

    model = ResNet20()
    rate = tf.Variable(0.05 * hvd.size(), trainable=False)
    variables = model.trainable_variables
    velocities = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in variables]

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        for variable, velocity, gradient in zip(variables, velocities, gradients, strict=True):
            velocity.assign(0.9 * velocity + gradient + 1e-4 * variable)
            variable.assign_sub(rate * velocity)
        return loss

    @tf.function(reduce_retracing=True)
    def count_correct(x, y):
        return tf.reduce_sum(tf.cast(tf.argmax(model(x, training=False), 1) == y, tf.float32))

    def step(indices, new_rate):
        rate.assign(new_rate)
        train_step(tf.constant(images[indices]), tf.constant(labels[indices]))

    def correct(rows):
        return count_correct(tf.constant(val_images[rows]), tf.constant(val_labels[rows]))

    hvd.broadcast_variables([*model.variables, *velocities], root_rank=0)
    shared.train(args, hvd, step, correct, sum(int(np.prod(variable.shape)) for variable in variables))


if __name__ == "__main__":
    main()
