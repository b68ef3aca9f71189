"""A loop of a user's own with hvdkit's helpers, in one framework: `own_loop.py FRAMEWORK FOLDER`.

It trains four epochs from a rank's own start. A second loop, with other weights, goes on from the checkpoint after two.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import hvdkit

framework, folder = sys.argv[1], Path(sys.argv[2])
SAMPLES = 21  # one more than two ranks share
x = np.random.RandomState(0).randn(SAMPLES, 4).astype("float32")
y = np.arange(SAMPLES) % 2
Loop = tuple[dict[str, Any], Callable[[], float], Callable[[], np.ndarray]]  # parts, an epoch's loss, weights


def pytorch(seed: int) -> Loop:
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.set_num_threads(1)
    torch.manual_seed(seed + hvd.rank())
    model = torch.nn.Linear(4, 2)
    own = torch.optim.Adam(model.parameters(), lr=hvdkit.scaled(0.01))
    optimizer = hvd.DistributedOptimizer(own, named_parameters=model.named_parameters())
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    mine = hvdkit.shard(torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y)))
    assert len(mine) == 10

    def epoch() -> float:
        for inputs, labels in torch.utils.data.DataLoader(mine, batch_size=5):
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
        schedule.step()
        return hvdkit.mean({"loss": loss}, count=5)["loss"]

    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    return parts, epoch, lambda: model.weight.detach().numpy()


def tensorflow(seed: int) -> Loop:
    import horovod.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    tf.random.set_seed(seed + hvd.rank())
    model, momentum = tf.Module(), tf.Module()
    model.weights = tf.Variable(tf.random.normal((4, 2)))
    momentum.weights = tf.Variable(tf.zeros((4, 2)))
    mine = hvdkit.shard(tf.data.Dataset.from_tensor_slices((x, y))).batch(5)

    def epoch() -> float:
        for inputs, labels in mine:
            with tf.GradientTape() as tape:
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, inputs @ model.weights)
                loss = tf.reduce_mean(losses)
            (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [model.weights])
            momentum.weights.assign(0.9 * momentum.weights + gradient)
            model.weights.assign_sub(hvdkit.scaled(0.05) * momentum.weights)
        return hvdkit.mean({"loss": loss}, count=5)["loss"]

    return {"model": model, "momentum": momentum}, epoch, lambda: model.weights.numpy()


def keras(seed: int) -> Loop:
    import horovod.keras as hvd
    import keras

    hvd.init()
    keras.utils.set_random_seed(seed + hvd.rank())
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(hvdkit.scaled(0.01)))
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    optimizer.build(model.trainable_variables)
    inputs, labels = hvdkit.shard(x), hvdkit.shard(y)

    def epoch() -> float:
        history = model.fit(inputs, labels, batch_size=5, shuffle=False, verbose=0).history
        return hvdkit.mean({"loss": history["loss"][-1]}, count=10)["loss"]

    return {"model": model, "optimizer": optimizer}, epoch, lambda: model.get_weights()[0]


def mxnet(seed: int) -> Loop:
    import horovod.mxnet as hvd
    import mxnet as mx
    from mxnet import autograd, gluon

    hvd.init()
    mx.random.seed(seed + hvd.rank())
    model = gluon.nn.Dense(2, in_units=4)
    model.initialize(mx.init.Normal(0.5))
    trainer = hvd.DistributedTrainer(model.collect_params(), "adam", {"learning_rate": hvdkit.scaled(0.01)})
    mine = hvdkit.shard(gluon.data.ArrayDataset(x, y.astype("float32")))
    losses_of = gluon.loss.SoftmaxCrossEntropyLoss()

    def epoch() -> float:
        for inputs, labels in gluon.data.DataLoader(mine, batch_size=5):
            with autograd.record():
                losses = losses_of(model(inputs), labels)
            losses.backward()
            trainer.step(5)
        return hvdkit.mean({"loss": losses.mean()}, count=5)["loss"]

    return {"model": model, "trainer": trainer}, epoch, lambda: model.weight.data().asnumpy()


def train(seed: int, where: Path, epochs: int) -> tuple[int, list[float], bytes]:
    parts, epoch, weights = globals()[framework](seed)
    kept = hvdkit.checkpoints(where, **parts)
    first = kept.restore().get("epoch", 0)
    losses = []
    for number in range(first, epochs):
        losses.append(epoch())
        kept.save(epoch=number + 1)
    return first, losses, np.ascontiguousarray(weights()).tobytes()


first, losses, whole = train(1, folder / "whole", 4)
assert first == 0 and len(losses) == 4
assert train(1, folder / "parts", 2)[1] == losses[:2]
first, rest, resumed = train(2, folder / "parts", 4)
assert (first, rest) == (2, losses[2:]), (first, rest, losses)
assert resumed == whole
horovod = sys.modules[
    {"pytorch": "horovod.torch", "keras": "horovod.tensorflow"}.get(framework, f"horovod.{framework}")
]
assert hvdkit.scaled(0.1) == 0.1 * horovod.size() and hvdkit.scaled(0.1, 0, warmup_steps=8) == 0.1
mean = hvdkit.mean({"rank": horovod.rank()}, count=3 * horovod.rank())["rank"]
assert mean == horovod.size() - 1, mean  # rank 0 has no samples
assert len(hvdkit.shard(y, even=False)) == SAMPLES // 2 + (horovod.rank() == 0)
try:
    hvdkit.mean({f"of {horovod.rank()}": 0.0})
except hvdkit.RequestError as error:
    print(error)
print("the same weights:", *np.frombuffer(whole[:8], np.float32))
