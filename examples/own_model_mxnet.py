"""Your own Gluon model on hvdkit's core: horovodrun -np 2 python examples/own_model_mxnet.py"""

import sys

from mxnet.gluon import nn
from sklearn.datasets import load_digits

from hvdkit.adapters import mxnet as adapter
from hvdkit.checkpoint.weights import save_weights
from hvdkit.core.group import world_of
from hvdkit.core.metrics import evaluate
from hvdkit.core.schedule import scaled_rate
from hvdkit.core.session import Session
from hvdkit.data.batches import ArraySplit, epoch_batches, steps_per_epoch
from hvdkit.recipe.schema import Loss, Schedule, Sgd
from hvdkit.strategies.dense import Dense
from hvdkit.tasks.image_classification import METRICS

RATE, BATCH_SIZE, EPOCHS, SEED = 0.05, 32, 10, 1
OUT = sys.argv[1] if len(sys.argv) > 1 else "runs/own_model_mxnet.safetensors"

topology = adapter.init(device="auto")
world = world_of(topology)
digits = load_digits()
images = digits.images[..., None].astype("float32") / 16
train, test = ArraySplit(images[360:], digits.target[360:]), ArraySplit(images[:360], digits.target[:360])

model = nn.HybridSequential()
model.add(nn.Conv2D(16, 3, padding=1, in_channels=1, activation="relu"), nn.MaxPool2D(2), nn.Dense(10, in_units=256))
session = Session(adapter, model, Sgd(learning_rate=RATE), Loss(), Dense(adapter, world, half=True))
session.broadcast_state(world)
steps = steps_per_epoch(len(train), BATCH_SIZE, topology.size)
plan = Schedule(base_batch_size=32, warmup_epochs=1)
rate = scaled_rate(RATE, plan, batch_size=BATCH_SIZE, size=topology.size, epochs=EPOCHS, steps_per_epoch=steps)

for epoch in range(EPOCHS):
    shard = epoch_batches(train, BATCH_SIZE, SEED, epoch, topology.rank, topology.size)
    for step, batch in enumerate(shard, start=epoch * steps):
        session.set_learning_rate(rate(step))
        session.train_step([batch])
    found = evaluate(adapter, session, METRICS, test, BATCH_SIZE, world)
    if topology.is_root:
        print(f"epoch {epoch + 1}: accuracy {found['accuracy']:.4f}, loss {found['loss']:.4f}", flush=True)
if topology.is_root:
    print("weights:", save_weights(session.state(), OUT), flush=True)
adapter.shutdown()
