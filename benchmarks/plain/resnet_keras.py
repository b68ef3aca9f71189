"""ResNet-20 on the digits in Keras 3 with Horovod, by hand: what hvdkit is measured against.

python benchmarks/plain/resnet_keras.py --epochs 2
horovodrun -np 2 python benchmarks/plain/resnet_keras.py --epochs 2 --horovod

Horovod's own Keras front end does not work under Keras 3, so the optimizer averages the gradients by
horovod.tensorflow.
"""

import keras
import shared
import tensorflow as tf
from keras import layers

hvd = shared.horovod("horovod.tensorflow")


class DistributedSGD(keras.optimizers.SGD):
    """SGD on gradients averaged over all ranks."""

    def apply(self, grads, trainable_variables=None):
        return super().apply(hvd.grouped_allreduce(grads, op=hvd.Average, name="gradients"), trainable_variables)


class Callback(keras.callbacks.Callback):
    """Learning rate, clock, and the end after `--steps`."""

    def __init__(self, args, steps_per_epoch):
        super().__init__()
        self.args, self.steps_per_epoch, self.step, self.clock = args, steps_per_epoch, 0, shared.Clock()

    def on_epoch_begin(self, epoch, logs=None):
        self.clock.resume()

    def on_train_batch_begin(self, batch, logs=None):
        rate = shared.learning_rate(self.step, self.steps_per_epoch, self.args.epochs, hvd.size())
        self.model.optimizer.learning_rate.assign(rate)

    def on_train_batch_end(self, batch, logs=None):
        self.clock.tick()
        self.step += 1
        if self.step == self.args.steps:
            self.model.stop_training = True


def conv_norm(x, outputs, kernel, stride):
    if stride != 1 and kernel > 1:  # "same" is asymmetric here
        x = layers.ZeroPadding2D(kernel // 2)(x)
    padding = "same" if stride == 1 else "valid"
    x = layers.Conv2D(outputs, kernel, stride, padding, use_bias=False, kernel_initializer="he_normal")(x)
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


def resnet20(classes=10):
    images = keras.Input((32, 32, 3))
    x = layers.ReLU()(conv_norm(images, 16, 3, 1))
    for outputs, stride in zip([16] * 3 + [32] * 3 + [64] * 3, [1, 1, 1, 2, 1, 1, 2, 1, 1], strict=True):
        y = layers.ReLU()(conv_norm(x, outputs, 3, stride))
        shortcut = conv_norm(x, outputs, 1, stride) if stride != 1 else x
        x = layers.ReLU()(layers.Add()([conv_norm(y, outputs, 3, 1), shortcut]))
    return keras.Model(images, layers.Dense(classes)(layers.GlobalAveragePooling2D()(x)))


def main():
    args = shared.options()
    hvd.init()
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    keras.utils.set_random_seed(1)
    (images, labels), (val_images, val_labels) = shared.digits()

    model = resnet20()
    optimizer = DistributedSGD(0.05 * hvd.size(), momentum=0.9, weight_decay=1e-4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Keras would compile by XLA, which Horovod's operations do not know here.
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables([variable.value for variable in [*model.variables, *optimizer.variables]], root_rank=0)

    steps_per_epoch = len(labels) // (args.batch_size * hvd.size())
    callback = Callback(args, steps_per_epoch)

    def batches():
        for epoch in range(args.epochs):
            for indices in shared.epoch_indices(len(labels), args.batch_size, epoch, hvd.rank(), hvd.size()):
                yield images[indices], labels[indices]

    mine = slice(hvd.rank(), None, hvd.size())
    history = model.fit(
        batches(),
        epochs=args.epochs,
        steps_per_epoch=steps_per_epoch,
        validation_data=(val_images[mine], val_labels[mine]),
        validation_batch_size=args.batch_size,
        callbacks=[callback],
        verbose=2 if hvd.rank() == 0 else 0,
    )
    accuracy = float(hvd.allreduce(tf.constant(history.history["val_accuracy"][-1]), op=hvd.Average, name="accuracy"))
    parameters = sum(variable.value.shape.num_elements() for variable in model.trainable_variables)
    shared.report_images(args, hvd, callback.clock, accuracy, parameters)


if __name__ == "__main__":
    main()
