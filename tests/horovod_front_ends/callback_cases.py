"""The Keras callbacks, elastic states, and reduced values."""

from __future__ import annotations

import os
import tempfile
import types
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import case, data, fit, its_share, model, once, raises, same
from keras import optimizers


@case
def variables_are_broadcast(hvd: types.ModuleType) -> None:
    for built in (True, False):
        keras.utils.set_random_seed(10 + hvd.rank())
        inputs = [keras.layers.Input((4,))] if built else []
        made = keras.Sequential(
            [*inputs, keras.layers.Dense(8), keras.layers.BatchNormalization(), keras.layers.Dense(2)]
        )
        made.compile(hvd.DistributedOptimizer(optimizers.SGD(0.0, momentum=0.9)), "mse")
        first = made.get_weights()
        fit(made, hvd.rank(), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(1)])
        after = hvd.allgather(np.concatenate([np.ravel(one) for one in made.trainable_weights])[None]).numpy()
        np.testing.assert_array_equal(after[0], after[1])
        momentum = hvd.allgather(np.concatenate([np.ravel(v) for v in made.optimizer.variables])[None]).numpy()
        np.testing.assert_array_equal(momentum[0], momentum[1])
        if built:
            assert np.array_equal(made.get_weights()[0], first[0]) == (hvd.rank() == 1)


@once
def the_first_step_starts_from_the_same_weights(hvd: types.ModuleType) -> None:
    root = model(hvd.DistributedOptimizer(optimizers.Adam(0.01)), seed=1)
    fit(root, hvd.rank(), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    other = model(hvd.DistributedOptimizer(optimizers.Adam(0.01)), seed=1 + hvd.rank())
    fit(other, hvd.rank(), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    same(other.get_weights(), root.get_weights())


@case
def local_variables_are_not_broadcast(hvd: types.ModuleType) -> None:
    made = model(optimizers.SGD(0.0), seed=20 + hvd.rank())
    kernel = made.layers[0].kernel
    mine = kernel.numpy()
    fit(made, hvd.rank(), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=[kernel])])
    np.testing.assert_array_equal(kernel.numpy(), mine)
    others = hvd.allgather(made.layers[1].kernel.numpy()[None]).numpy()
    np.testing.assert_array_equal(others[0], others[1])


@once
def unlike_models_are_refused_on_all_ranks(hvd: types.ModuleType) -> None:
    made = keras.Sequential([keras.layers.Input((4,)), *[keras.layers.Dense(2) for _ in range(1 + hvd.rank())]])
    made.compile(optimizers.SGD(0.0), "mse")
    with raises(ValueError, match="the ranks do not have the same variables"):
        fit(made, hvd.rank(), callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])


@case
def metrics_are_averaged_for_later_callbacks(hvd: types.ModuleType) -> None:
    seen: list[dict[str, float]] = []
    made = model(optimizers.SGD(0.0))
    x, y = data(hvd.rank())
    history = fit(
        made,
        hvd.rank(),
        validation_data=(x[:8], y[:8]),
        callbacks=[
            hvd.callbacks.MetricAverageCallback(),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs))),
        ],
    ).history
    losses = [made.evaluate(*data(rank), verbose=0) for rank in range(2)]
    firsts = [made.evaluate(data(rank)[0][:8], data(rank)[1][:8], verbose=0) for rank in range(2)]
    np.testing.assert_allclose(history["loss"], [np.mean(losses)], rtol=1e-5)
    np.testing.assert_allclose(history["val_loss"], [np.mean(firsts)], rtol=1e-5)
    assert seen[0]["loss"] == history["loss"][0]


class Rates(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate))


class Weights(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.by_epoch: list[list[np.ndarray]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.by_epoch.append(self.model.get_weights())


@case
def the_learning_rate_follows_its_schedule(hvd: types.ModuleType) -> None:
    schedule, rates = hvd.callbacks.LearningRateScheduleCallback, Rates()
    made = model(hvd.DistributedOptimizer(optimizers.SGD(1.0)))
    history = fit(
        made,
        hvd.rank(),
        5,
        callbacks=[
            schedule(0.1, multiplier=0.5, start_epoch=1, end_epoch=3),
            schedule(0.1, multiplier=lambda epoch: epoch, start_epoch=3, end_epoch=4, staircase=False),
            rates,
        ],
    ).history
    smooth = [0.3, 0.325, 0.35, 0.375]
    wanted = [1.0] * 4 + [0.1] * 4 + [0.05] * 4 + smooth + [0.375] * 4
    np.testing.assert_allclose(rates.rates, wanted, rtol=1e-6)
    np.testing.assert_allclose(history["lr"], wanted[3::4], rtol=1e-6)
    assert float(made.optimizer.lr) == np.float32(0.375)
    with raises(ValueError, match="steps_per_epoch"):
        stream = tf.data.Dataset.from_generator(
            lambda: iter([(np.ones((8, 4)), np.ones((8, 2)))]),
            output_signature=(tf.TensorSpec((8, 4)), tf.TensorSpec((8, 2))),
        )
        made.fit(stream, verbose=0, callbacks=[hvd.callbacks.LearningRateWarmupCallback(0.1)])


@case
def warmup_corrects_the_momentum(hvd: types.ModuleType) -> None:
    """The gradient is 1 at each step, so weight and velocity are known."""
    for momentum_correction in its_share(hvd, [True, False]):
        rates = Rates()
        made = keras.Sequential(
            [keras.layers.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        made.compile(
            hvd.DistributedOptimizer(optimizers.SGD(0.4, momentum=0.5)),
            lambda y, predicted: predicted,
            jit_compile=False,
        )
        made.fit(
            np.ones((4, 1)),
            np.ones((4, 1)),
            batch_size=1,
            epochs=3,
            verbose=0,
            callbacks=[
                hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, momentum_correction=momentum_correction),
                rates,
            ],
        )
        wanted = [0.2 * (1 + min(batch + 1, 8) / 8) for batch in range(12)]
        np.testing.assert_allclose(rates.rates, wanted, rtol=1e-6)
        weight = velocity = 0.0
        before = 0.4
        for rate in wanted:
            correction = rate / before if momentum_correction else 1.0
            velocity = 0.5 * correction * velocity - rate
            weight, before = weight + velocity, rate
        np.testing.assert_allclose(made.get_weights()[0].item(), weight, rtol=1e-5)


@case
def the_best_model_is_saved(hvd: types.ModuleType) -> None:
    folder = Path(tempfile.mkdtemp(dir=os.environ["HVDKIT_RANK_DIR"]))
    with raises(ValueError, match="filepath"):
        fit(model(optimizers.SGD(0.1)), 0, callbacks=[hvd.callbacks.BestModelCheckpoint(monitor="loss")])
    whole, weights_alone = (False, "best.keras"), (True, "best.weights.h5")
    variants = [(*whole, True), (*whole, False), (*weights_alone, False), (*weights_alone, True)]
    for weights_only, name, later in its_share(hvd, variants):
        given = {} if later else {"filepath": str(folder / name)}
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss", save_weights_only=weights_only, **given)
        if later:
            best.filepath = str(folder / name)
        made = model(hvd.DistributedOptimizer(optimizers.SGD(0.01)))
        weights = Weights()
        worse = hvd.callbacks.LearningRateScheduleCallback(0.01, multiplier=lambda epoch: 1 if epoch == 0 else -9)
        losses = fit(made, hvd.rank(), 3, callbacks=[worse, best, weights]).history["loss"]
        other = model(optimizers.SGD(0.01), seed=9)
        if weights_only:
            other.load_weights(folder / name)
        else:
            other = keras.models.load_model(folder / name)
        same(other.get_weights(), weights.by_epoch[int(np.argmin(losses))])


@case
def values_are_reduced_and_gathered(hvd: types.ModuleType) -> None:
    rank = hvd.rank()
    np.testing.assert_array_equal(hvd.allreduce([1.0 + rank, 4.0]), [1.5, 4])
    np.testing.assert_array_equal(hvd.allreduce([1.0 + rank], average=False), [3])
    np.testing.assert_array_equal(hvd.allreduce([1.0 + rank], op=hvd.Sum, prescale_factor=0.5), [1.5])
    np.testing.assert_array_equal(hvd.allreduce(keras.Variable([rank * 1.0]), compression=hvd.Compression.fp16), [0.5])
    np.testing.assert_array_equal(hvd.allgather([[rank]] * (1 + rank), name="uneven"), [[0], [1], [1]])
    np.testing.assert_array_equal(hvd.broadcast([rank, 5], root_rank=1), [1, 5])
    np.testing.assert_array_equal(
        hvd.reducescatter([1.0, 2.0 + rank, 3.0, 4.0 + rank], op=hvd.Sum), [[2, 5], [6, 9]][rank]
    )
    with raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        hvd.broadcast_global_variables(0)


@case
def a_state_is_synchronized_and_restored(hvd: types.ModuleType) -> None:
    made = model(hvd.DistributedOptimizer(optimizers.Adam(0.01)), seed=30 + hvd.rank())
    state = hvd.elastic.KerasState(made, batch=hvd.rank(), epoch=5 + hvd.rank())
    first = made.get_weights()
    state.sync()
    assert (state.batch, state.epoch) == (0, 5)
    weights = hvd.broadcast(made.get_weights()[0], 0).numpy()
    np.testing.assert_array_equal(made.get_weights()[0], weights)
    assert np.array_equal(weights, first[0]) == (hvd.rank() == 0)
    fit(made, hvd.rank())
    state.batch = 7
    state.commit()
    committed = [one.numpy() for one in [*made.variables, *made.optimizer.variables]]
    fit(made, hvd.rank())
    after = [one.numpy() for one in [*made.variables, *made.optimizer.variables]]
    state.batch = 9
    state.restore()
    assert state.batch == 7
    same([one.numpy() for one in [*made.variables, *made.optimizer.variables]], committed)
    fit(made, hvd.rank())
    same([one.numpy() for one in [*made.variables, *made.optimizer.variables]], after)


@case
def callbacks_keep_an_elastic_state(hvd: types.ModuleType) -> None:
    elastic, batches = hvd.elastic, []

    class State:
        batch, epoch, commits = 0, 3, 0

        def commit(self) -> None:
            self.commits += 1

    state = State()
    made = model(hvd.DistributedOptimizer(optimizers.SGD(0.1)))
    keep = [elastic.UpdateBatchStateCallback(state), elastic.UpdateEpochStateCallback(state)]
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(state.batch))
    fit(made, hvd.rank(), 2, callbacks=[*keep, elastic.CommitStateCallback(state, batches_per_commit=3), note])
    assert batches == [0, 1, 2, 3] * 2
    assert (state.batch, state.epoch, state.commits) == (0, 5, 4)
    # Training goes on at the third of four batches, so its first epoch has two.
    state.batch, batches[:] = 2, []
    history = fit(made, hvd.rank(), 2, callbacks=[*keep, note]).history
    assert batches == [2, 3, 0, 1, 2, 3]
    assert (state.batch, state.epoch, len(history["loss"])) == (0, 7, 2)
    state.batch = 3
    stop = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: setattr(made, "stop_training", True))
    assert len(fit(made, hvd.rank(), 3, callbacks=[stop, *keep]).history["loss"]) == 1
