"""Models with a distributed optimizer: training, files."""

from __future__ import annotations

import os
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import case, data, everyones_data, fit, its_share, model, once, raises, same
from keras import optimizers


@keras.saving.register_keras_serializable("tests")
class Registered(optimizers.SGD):
    pass


class Unregistered(optimizers.SGD):
    def __init__(self, strength: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.strength = strength

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient * self.strength, variable, learning_rate)

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"strength": self.strength}


@case
def fit_trains_as_one_process_does_with_all_data(hvd: types.ModuleType) -> None:
    alone = model(optimizers.Adam(0.01, clipnorm=0.1))
    alone.fit(*everyones_data(), batch_size=16, epochs=2, verbose=0, shuffle=False)
    variants: list[dict[str, Any]] = [
        {},
        {"steps_per_execution": 2},
        {"experimental_run_tf_function": False},
        {"run_eagerly": True},
        {"jit_compile": False},
    ]
    for arguments in its_share(hvd, variants):
        optimizer = hvd.DistributedOptimizer(optimizers.Adam(0.01, clipnorm=0.1))
        together = model(optimizer, **arguments)
        fit(together, hvd.rank(), 2)
        same(together.get_weights(), alone.get_weights(), 2e-5)
    sums = model(
        hvd.DistributedOptimizer(optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=True)
    )
    fit(sums, hvd.rank())
    larger = model(optimizers.SGD(0.1))
    larger.fit(*everyones_data(), batch_size=32, verbose=0, shuffle=False)
    same(sums.get_weights(), larger.get_weights(), 2e-5)


@once
def keras_does_not_choose_xla(hvd: types.ModuleType) -> None:
    listed = tf.config.list_physical_devices
    tf.config.list_physical_devices = lambda kind=None: [types.SimpleNamespace(device_type="GPU", name="GPU:0")]
    try:
        assert model(optimizers.SGD(0.1)).jit_compile is True
        assert model(hvd.DistributedOptimizer(optimizers.SGD(0.1))).jit_compile is False
    finally:
        tf.config.list_physical_devices = listed


@once
def xla_compiles_a_model_if_asked_to(hvd: types.ModuleType) -> None:
    alone = model(optimizers.Adam(0.01, clipnorm=0.1))
    alone.fit(*everyones_data(), batch_size=16, verbose=0, shuffle=False)
    for arguments in ({}, {"groups": 1}):
        together = model(hvd.DistributedOptimizer(optimizers.Adam(0.01, clipnorm=0.1), **arguments), jit_compile=True)
        fit(together, hvd.rank())
        assert together.jit_compile is True
        same(together.get_weights(), alone.get_weights(), 2e-5)


@once
def an_embedding_is_trained(hvd: types.ModuleType) -> None:
    x = [np.random.default_rng(rank).integers(10, size=(16, 3)) for rank in range(2)]
    weights = []
    everyones = np.concatenate([x[0][:8], x[1][:8], x[0][8:], x[1][8:]])
    for optimizer, batch, words in (
        (optimizers.SGD(0.1, momentum=0.9), 16, everyones),
        (hvd.DistributedOptimizer(optimizers.SGD(0.1, momentum=0.9)), 8, x[hvd.rank()]),
        (hvd.DistributedOptimizer(optimizers.SGD(0.1, momentum=0.9), sparse_as_dense=True), 8, x[hvd.rank()]),
        (hvd.DistributedOptimizer(optimizers.Adam(0.1)), 8, x[hvd.rank()]),
        (hvd.DistributedOptimizer(optimizers.Adam(0.1), sparse_as_dense=True), 8, x[hvd.rank()]),
    ):
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.layers.Embedding(10, 4), keras.layers.Flatten(), keras.layers.Dense(1)])
        made.compile(optimizer, "mse")
        made.fit(words, words.sum(1) / 10.0, batch_size=batch, epochs=2, verbose=0, shuffle=False)
        weights.append(made.get_weights())
    same(weights[1], weights[0], 1e-5)
    same(weights[2], weights[0], 1e-5)
    same(weights[3], weights[4], 1e-5)


@once
def mixed_float16_is_trained(hvd: types.ModuleType) -> None:
    keras.config.set_dtype_policy("mixed_float16")
    try:
        together = model(hvd.DistributedOptimizer(optimizers.SGD(0.1)))
        assert type(together.optimizer) is optimizers.LossScaleOptimizer
        fit(together, hvd.rank())
        alone = model(optimizers.SGD(0.1))
        alone.fit(*everyones_data(), batch_size=16, verbose=0, shuffle=False)
        same(together.get_weights(), alone.get_weights(), 3e-3)
        x, y = data(hvd.rank())
        before, scale = together.get_weights(), float(together.optimizer.dynamic_scale)
        together.train_on_batch(x[:8] * (np.inf if hvd.rank() == 1 else 1), y[:8])
        same(together.get_weights(), before)
        assert float(together.optimizer.dynamic_scale) == scale / 2
    finally:
        keras.config.set_dtype_policy("float32")


def saved(made: Any, name: str) -> str:
    path = str(Path(tempfile.mkdtemp(dir=os.environ["HVDKIT_RANK_DIR"])) / name)
    made.save(path)
    return path


@case
def training_goes_on_from_a_file_bit_for_bit(hvd: types.ModuleType) -> None:
    def scaled() -> Any:
        return optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=4.0)

    variants: list[tuple[Callable[[], Any], str]] = [
        (lambda: optimizers.SGD(0.1, momentum=0.9), "h5"),
        (lambda: optimizers.SGD(0.1, momentum=0.9), "keras"),
        (lambda: optimizers.Adam(0.01, use_ema=True), "keras"),
        (scaled, "h5"),
        (scaled, "keras"),
    ]
    for make, ending in its_share(hvd, variants):
        straight = model(hvd.DistributedOptimizer(make()))
        fit(straight, hvd.rank())
        straight.optimizer.learning_rate = 0.05
        path = saved(straight, f"model.{ending}")
        fit(straight, hvd.rank())
        again = hvd.load_model(path)
        assert type(again.optimizer).__name__ == type(make()).__name__
        assert float(again.optimizer.learning_rate) == np.float32(0.05)
        fit(again, hvd.rank())
        same(again.get_weights(), straight.get_weights())
        same([v.numpy() for v in again.optimizer.variables], [v.numpy() for v in straight.optimizer.variables])


@case
def a_saved_model_needs_no_horovod(hvd: types.ModuleType) -> None:
    variants: list[tuple[Callable[[], Any], dict[str, Any]]] = [
        (lambda: optimizers.Adam(0.01), {}),
        (lambda: Registered(0.01), {}),
        (lambda: Unregistered(0.5, learning_rate=0.01), {"Unregistered": Unregistered}),
    ]
    for make, custom in its_share(hvd, variants):
        together = model(hvd.DistributedOptimizer(make()))
        fit(together, hvd.rank())
        for ending in ("keras", "h5"):
            path = saved(together, f"model.{ending}")
            alone = keras.models.load_model(path, custom_objects=custom)
            assert type(alone.optimizer) is type(make())
            if ending == "keras":  # Keras itself does not read them from HDF5
                same([v.numpy() for v in alone.optimizer.variables], [v.numpy() for v in together.optimizer.variables])
            again = hvd.load_model(path, custom_optimizers=list(custom.values()), compression=hvd.Compression.fp16)
            assert isinstance(again.optimizer, type(make()))
            assert type(again.optimizer) is not type(make())
            assert getattr(again.optimizer, "strength", 0.5) == 0.5
            weights = again.get_weights()
            fit(again, hvd.rank())
            assert not np.array_equal(again.get_weights()[0], weights[0])
    plain = keras.optimizers.deserialize(keras.optimizers.serialize(hvd.DistributedOptimizer(optimizers.Adam(0.25))))
    assert type(plain) is optimizers.Adam
    assert float(plain.learning_rate) == 0.25


@case
def a_model_without_optimizer_is_loaded(hvd: types.ModuleType) -> None:
    made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
    same(hvd.load_model(saved(made, "model.keras")).get_weights(), made.get_weights())
    with raises(ValueError, match="legacy"):
        hvd.load_model("missing.keras", legacy_opts=True)
