"""A loop by DistributedGradientTape, fp16 compression and Adam, in the form of Horovod's documentation of 2023."""

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
for gpu in gpus:
    tf.config.experimental.set_memory_growth(gpu, True)
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")

tf.random.set_seed(7 + hvd.rank())
images = tf.random.normal((256, 28, 28, 1))
labels = tf.cast(tf.reduce_mean(images[:, :14], (1, 2, 3)) > tf.reduce_mean(images[:, 14:], (1, 2, 3)), tf.int64)
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).repeat().shuffle(256).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss_of = tf.losses.SparseCategoricalCrossentropy()
optimizer = tf.optimizers.Adam(0.001 * hvd.size())
checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer)


@tf.function
def training_step(images: tf.Tensor, labels: tf.Tensor, first_batch: bool) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    tape = hvd.DistributedGradientTape(tape, compression=hvd.Compression.fp16)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables(), root_rank=0)
    return loss


for batch, (x, y) in enumerate(dataset.take(20)):
    loss = training_step(x, y, batch == 0)
    if batch % 10 == 0 and hvd.rank() == 0:
        print(f"step {batch}: loss {loss.numpy():.3f}")
if hvd.rank() == 0:
    checkpoint.save("./checkpoints")
print("weights", sum(float(tf.reduce_sum(tf.abs(tf.cast(value, tf.float64)))) for value in model.trainable_variables))
