"""TensorFlow 2 with Horovod, in the steps of https://horovod.readthedocs.io/en/stable/tensorflow.html."""

import horovod.tensorflow as hvd
import tensorflow as tf
from sklearn.datasets import load_digits

# Initialize Horovod, and pin a GPU to this process, where there is one.
hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")
tf.keras.utils.set_random_seed(hvd.rank())

images, labels = load_digits(return_X_y=True)
dataset = tf.data.Dataset.from_tensor_slices(((images / 16).astype("float32"), labels))
dataset = dataset.shard(hvd.size(), hvd.rank()).shuffle(1000).batch(32, drop_remainder=True)

model = tf.keras.Sequential([tf.keras.layers.Dense(64, activation="relu"), tf.keras.layers.Dense(10)])
loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# Scale the learning rate.
optimizer = tf.optimizers.Adam(0.002 * hvd.size())


@tf.function
def training_step(images, labels, first_batch):
    with tf.GradientTape() as tape:
        value = loss(labels, model(images, training=True))
    # Wrap the tape: its gradients are averaged over the ranks.
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    # Start all ranks from rank 0's state: after the first step, when all variables are there.
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables(), root_rank=0)


step = 0
for _ in range(8):
    for data, target in dataset:
        training_step(data, target, step == 0)
        step += 1

right = tf.reduce_mean(tf.cast(tf.argmax(model((images / 16).astype("float32")), 1) == labels, tf.float32))
checksum = sum(tf.reduce_sum(tf.cast(one, tf.float64)) for one in model.trainable_weights)
if hvd.rank() == 0:
    tf.train.Checkpoint(model=model, optimizer=optimizer).write("checkpoint")
print(f"trained {hvd.rank()} {hvd.allreduce(right).numpy():.4f} {checksum.numpy():.12f}", flush=True)
