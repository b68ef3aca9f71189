"""The cases that tests/horovod_front_ends runs on two ranks, and what they share.

What a distributed optimizer does is compared with Keras' own optimizer, which gets the gradients of both ranks
averaged, or the batches of both.
"""

from __future__ import annotations

import contextlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

KERAS = ("horovod.keras", "horovod.tensorflow.keras")
SHAPES = [(3, 2), (2,), (4, 3)]
Case = Callable[[types.ModuleType], None]
CASES: list[tuple[Case, tuple[str, ...]]] = []


def case(function: Case) -> Case:
    """A case for both Keras front ends."""
    CASES.append((function, KERAS))
    return function


def once(function: Case) -> Case:
    """A case for the last Keras front end only: of what is behind both, and takes seconds."""
    CASES.append((function, KERAS[-1:]))
    return function


def plain(function: Case) -> Case:
    """A case for horovod.tensorflow."""
    CASES.append((function, ("horovod.tensorflow",)))
    return function


@contextlib.contextmanager
def raises(kind: type[Exception], match: str) -> Iterator[None]:
    """The runtime has no pytest."""
    try:
        yield
    except kind as error:
        assert re.search(match, str(error)), error
    else:
        raise AssertionError(f"no {kind.__name__}")


def gradients(rank: int, step: int) -> list[np.ndarray]:
    random = np.random.default_rng([rank, step])
    return [random.standard_normal(shape).astype("float32") for shape in SHAPES]


def mean(step: int) -> list[np.ndarray]:
    return [(one + other) * np.float32(0.5) for one, other in zip(gradients(0, step), gradients(1, step), strict=True)]


def variables() -> list[Any]:
    random = np.random.default_rng(7)
    return [keras.Variable(random.standard_normal(shape).astype("float32")) for shape in SHAPES]


def trained(optimizer: Any, steps: list[Any], in_function: bool = False, into: list[Any] | None = None) -> list[Any]:
    """The variables, and the optimizer's, after the gradients of some steps were applied."""
    into = variables() if into is None else into

    def apply(values: list[Any]) -> None:
        optimizer.apply(values, into)

    call = tf.function(apply) if in_function else apply
    for values in steps:
        call(
            [value if value is None or isinstance(value, tf.IndexedSlices) else tf.constant(value) for value in values]
        )
    return [variable.numpy() for variable in [*into, *optimizer.variables]]


def same(got: list[Any], wanted: list[Any], tolerance: float = 0.0) -> None:
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def own(hvd: types.ModuleType, steps: int = 3) -> list[list[np.ndarray]]:
    return [gradients(hvd.rank(), step) for step in range(steps)]


def means(steps: int = 3) -> list[list[np.ndarray]]:
    return [mean(step) for step in range(steps)]


def its_share(hvd: types.ModuleType, variants: list[Any]) -> list[Any]:
    """The variants for this front end, where each takes seconds: the other one takes the others."""
    return variants[KERAS.index(hvd.__name__) :: len(KERAS)]


def data(rank: int, batches: int = 4) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(rank)
    return random.standard_normal((8 * batches, 4)).astype("float32"), random.standard_normal((8 * batches, 2))


def everyones_data(batches: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """The batches of both ranks, side by side."""
    return tuple(
        np.concatenate([np.stack([one[i : i + 8], other[i : i + 8]]) for i in range(0, 8 * batches, 8)]).reshape(
            16 * batches, -1
        )
        for one, other in zip(data(0, batches), data(1, batches), strict=True)
    )


def model(optimizer: Any, seed: int = 1, **compile_arguments: Any) -> Any:
    keras.utils.set_random_seed(seed)
    made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)])
    made.compile(optimizer, keras.losses.MeanSquaredError(), **compile_arguments)
    return made


def fit(made: Any, rank: int, epochs: int = 1, **arguments: Any) -> Any:
    x, y = data(rank)
    return made.fit(x, y, batch_size=8, epochs=epochs, verbose=0, shuffle=False, **arguments)


def trained_by_hand(hvd: types.ModuleType, distributed: bool, jit_compile: bool | None = None) -> list[np.ndarray]:
    """The weights after a loop of one's own, on this rank's data or, alone, on all data; ranks begin as rank 0 does."""
    x, y = data(hvd.rank()) if distributed else everyones_data()
    batch = 8 if distributed else 16
    keras.utils.set_random_seed(1 + (hvd.rank() if distributed else 0))
    normalization = hvd.SyncBatchNormalization() if distributed else keras.layers.BatchNormalization()
    hidden = keras.layers.Dense(8, use_bias=False)
    made = keras.Sequential([keras.layers.Input((4,)), hidden, normalization, keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(made.trainable_variables)
    hvd.broadcast_variables(made.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    def step(x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(y, made(x, training=True))
        tape = hvd.DistributedGradientTape(tape) if distributed else tape
        found = tape.gradient(loss, made.trainable_variables)
        optimizer.apply_gradients(zip(found, made.trainable_variables, strict=True))

    call = tf.function(step, jit_compile=jit_compile)
    for at in range(0, len(x), batch):
        call(tf.constant(x[at : at + batch]), tf.constant(y[at : at + batch], tf.float32))
    return made.get_weights()
