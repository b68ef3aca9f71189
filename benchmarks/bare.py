"""One process, one training step, no Horovod and no hvdkit: from an interpreter's start to there is the least there is.

    python benchmarks/bare.py pytorch

The network, its optimizer, the digits and the batch are those of `plain/<framework>.py`. Prints the wall clock, in
seconds, at the end of the step.
"""

import importlib.util
import sys
import time
from pathlib import Path
from types import ModuleType

import shared

BATCH, RATE, MOMENTUM, DECAY = 32, 0.05, 0.9, 1e-4


def plain(framework):
    """The plain script as a module. A stand-in takes Horovod's name: its network needs none, and none is loaded."""
    horovod = sys.modules["horovod"] = ModuleType("horovod")
    for name in ("torch", "tensorflow", "mxnet"):
        stand_in = sys.modules[f"horovod.{name}"] = ModuleType(f"horovod.{name}")
        setattr(horovod, name, stand_in)
    path = Path(__file__).with_name("plain") / f"{framework}.py"
    script = importlib.util.spec_from_file_location("plain_script", path)
    module = importlib.util.module_from_spec(script)
    script.loader.exec_module(module)
    return module


def batch():
    """The first of the first epoch: images (32, 32, 32, 3), labels (32,)."""
    (images, labels), _ = shared.digits()
    first = shared.epoch_indices(len(labels), BATCH, 0, 0, 2)[0]
    return images[first], labels[first]


def pytorch():
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    model = plain("pytorch").ResNet20()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM, weight_decay=DECAY)
    images, labels = batch()
    images = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    F.cross_entropy(model(images), torch.from_numpy(labels)).backward()
    optimizer.step()


def tensorflow():
    import tensorflow as tf

    one_thread(tf)
    model = plain("tensorflow").ResNet20()
    variables = model.trainable_variables
    velocities = [tf.Variable(tf.zeros_like(variable), trainable=False) for variable in variables]

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x, training=True)))
        for variable, velocity, gradient in zip(variables, velocities, tape.gradient(loss, variables), strict=True):
            velocity.assign(MOMENTUM * velocity + gradient + DECAY * variable)
            variable.assign_sub(RATE * velocity)
        return loss

    train_step(*map(tf.constant, batch())).numpy()


def keras():
    import keras as keras_
    import tensorflow as tf

    one_thread(tf)
    model = plain("keras").resnet20()
    optimizer = keras_.optimizers.SGD(RATE, momentum=MOMENTUM, weight_decay=DECAY)
    loss = keras_.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    model.fit(*batch(), batch_size=BATCH, verbose=0)


def one_thread(tf):
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)


def mxnet():
    import mxnet as mx
    from mxnet import autograd, gluon

    net = plain("mxnet").resnet20()
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": RATE, "momentum": MOMENTUM, "wd": DECAY})
    images, labels = batch()
    x, y = mx.nd.array(images.transpose(0, 3, 1, 2)), mx.nd.array(labels)
    with autograd.record():
        loss = gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
    loss.backward()
    trainer.step(BATCH)
    mx.nd.waitall()


if __name__ == "__main__":
    {"pytorch": pytorch, "tensorflow": tensorflow, "keras": keras, "mxnet": mxnet}[sys.argv[1]]()
    print(time.time(), flush=True)
