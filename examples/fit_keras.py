"""Keras's `model.fit` under Horovod: the lines with `hvd` and `hvdkit` are all that a script for one process lacks.

hvdkit launch -np 2 examples/fit_keras.py runs/fit
"""

import sys
from pathlib import Path

import horovod.keras as hvd
import keras
from sklearn.datasets import load_digits

import hvdkit

hvd.init()
pixels, labels = load_digits(return_X_y=True)
pixels = (pixels / 16).astype("float32").reshape(-1, 8, 8, 1)
train = hvdkit.shard(pixels[360:]), hvdkit.shard(labels[360:])  # this rank's part
test = pixels[:360], labels[:360]

model = keras.Sequential(
    [
        keras.layers.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10),
    ]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(hvdkit.scaled(0.001)))  # × the number of ranks
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"])

callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
if hvd.rank() == 0:  # what writes files
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    callbacks += [keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True)]
    callbacks += [keras.callbacks.CSVLogger(folder / "log.csv")]
shown = 2 if hvd.rank() == 0 else 0
model.fit(*train, batch_size=32, epochs=6, validation_data=test, callbacks=callbacks, verbose=shown)
print(f"accuracy {model.evaluate(*test, verbose=0)[1]:.4f}", flush=True)
