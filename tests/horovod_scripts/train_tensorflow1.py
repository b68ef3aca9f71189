"""TensorFlow 1's sessions with Horovod, in the steps of the README of Horovod's release."""

import horovod.tensorflow as hvd
import numpy as np
import tensorflow.compat.v1 as tf
from sklearn.datasets import load_digits

tf.disable_eager_execution()
# Initialize Horovod, and pin a GPU to this process, where there is one.
hvd.init()
config = tf.ConfigProto()
config.gpu_options.visible_device_list = str(hvd.local_rank())

images, labels = load_digits(return_X_y=True)
mine = np.random.default_rng(hvd.rank()).permutation(len(images))
tf.set_random_seed(hvd.rank())
data, target = tf.placeholder(tf.float32, (None, 64)), tf.placeholder(tf.int64, (None,))
hidden = tf.get_variable("hidden", (64, 64))
output = tf.get_variable("output", (64, 10))
logits = tf.matmul(tf.nn.relu(tf.matmul(data, hidden)), output)
loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=target, logits=logits))
right = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, 1), target), tf.float32))
checksum = tf.reduce_sum(tf.cast(hidden, tf.float64)) + tf.reduce_sum(tf.cast(output, tf.float64))

# Scale the learning rate, wrap the optimizer, and start all ranks from rank 0's state.
optimizer = tf.train.AdagradOptimizer(0.05 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer)
hooks = [hvd.BroadcastGlobalVariablesHook(0)]
step = optimizer.minimize(loss, global_step=tf.train.get_or_create_global_step())
with tf.train.MonitoredTrainingSession(
    checkpoint_dir="checkpoint" if hvd.rank() == 0 else None, config=config, hooks=hooks
) as session:
    for at in range(8 * 28):
        batch = mine[at % 28 * 64 : at % 28 * 64 + 64]
        session.run(step, {data: images[batch] / 16, target: labels[batch]})
    found, total = session.run([right, checksum], {data: images / 16, target: labels})
print(f"trained {hvd.rank()} {found:.4f} {total:.12f}", flush=True)
