"""Keras with Horovod, in the steps of https://horovod.readthedocs.io/en/stable/keras.html."""

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

# Initialize Horovod, and pin a GPU to this process, where there is one.
hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
tf.keras.utils.set_random_seed(hvd.rank())

images, labels = load_digits(return_X_y=True)
x, y = (images / 16).astype("float32"), labels
model = tf.keras.Sequential(
    [tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(10, activation="softmax")]
)

# Scale the learning rate, and wrap the optimizer.
scaled = 0.002 * hvd.size()
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(scaled))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], experimental_run_tf_function=False)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled, warmup_epochs=2, verbose=0),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("checkpoint-{epoch}.keras"))

steps = len(x) // 32 // hvd.size()
model.fit(x, y, batch_size=32, steps_per_epoch=steps, callbacks=callbacks, epochs=12, verbose=0)
right = model.evaluate(x, y, verbose=0)[1]
checksum = sum(tf.reduce_sum(tf.cast(one, tf.float64)) for one in model.trainable_weights)
print(f"trained {hvd.rank()} {right:.4f} {checksum.numpy():.12f}", flush=True)
