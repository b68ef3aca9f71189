"""Keras with Horovod, in the form of Horovod's example tensorflow2_keras_mnist.py, on the digits of scikit-learn."""

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from sklearn.datasets import load_digits


def train():
    hvd.init()
    images, labels = load_digits(return_X_y=True)
    x, y = tf.cast(images.reshape(-1, 8, 8, 1) / 16, tf.float32), tf.cast(labels, tf.int64)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).repeat().shuffle(10000).batch(64)
    model = tf.keras.Sequential(
        [
            tf.keras.layers.Conv2D(16, [3, 3], activation="relu"),
            tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
            tf.keras.layers.Dropout(0.1),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10, activation="softmax"),
        ]
    )
    scaled_lr = 0.002 * hvd.size()
    opt = hvd.DistributedOptimizer(
        tf.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
    )
    model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=3, verbose=1),
    ]
    if hvd.rank() == 0:
        callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))
    verbose = 1 if hvd.rank() == 0 else 0
    model.fit(dataset, steps_per_epoch=100 // hvd.size(), callbacks=callbacks, epochs=8, verbose=verbose)

    right = model.evaluate(x, y, verbose=0)[1]
    checksum = sum(tf.reduce_sum(tf.cast(one, tf.float64)) for one in model.trainable_weights)
    print(f"trained {hvd.rank()} {right:.4f} {checksum.numpy():.12f}", flush=True)


if __name__ == "__main__":
    train()
