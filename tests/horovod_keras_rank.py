"""One rank of two that tries Horovod's Keras front ends, `horovod.keras` and `horovod.tensorflow.keras`.

Prints a line `case FRONT_END NAME OUTCOME` for each case: `passed`, or the failure. What a distributed optimizer does
is compared with Keras' own optimizer, which gets the gradients of both ranks averaged, or the batches of both.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import optimizers

FRONT_ENDS = ("horovod.keras", "horovod.tensorflow.keras")
SHAPES = [(3, 2), (2,), (4, 3)]
CASES: list[Callable[[types.ModuleType], None]] = []
ONCE: list[str] = []


def case(function: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
    """A case for both front ends."""
    CASES.append(function)
    return function


def once(function: Callable[[types.ModuleType], None]) -> Callable[[types.ModuleType], None]:
    """A case for the last front end only: of what is behind both, and takes seconds."""
    ONCE.append(function.__name__)
    return case(function)


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
    return variants[FRONT_ENDS.index(hvd.__name__) :: len(FRONT_ENDS)]


# Optimizers


@case
def every_optimizer_and_option_applies_the_average(hvd: types.ModuleType) -> None:
    makers = [
        lambda: optimizers.SGD(0.1),
        lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
        lambda: optimizers.Adam(0.1),
        lambda: optimizers.AdamW(0.1, weight_decay=0.1),
        lambda: optimizers.RMSprop(0.1, momentum=0.5, centered=True),
        lambda: optimizers.Lamb(0.1),
        lambda: optimizers.SGD(0.1, clipnorm=0.5),
        lambda: optimizers.SGD(0.1, global_clipnorm=0.5),
        lambda: optimizers.SGD(0.1, clipvalue=0.25),
        lambda: optimizers.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
        lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2),
        lambda: optimizers.SGD(0.1, loss_scale_factor=8.0),
        lambda: optimizers.SGD(optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
        lambda: optimizers.SGD(lambda: 0.05),
        lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1, momentum=0.9), initial_scale=2.0),
        lambda: optimizers.MultiOptimizer(optimizers.OptimizerMap(optimizers.SGD(0.1, momentum=0.9))),
    ]
    for make in its_share(hvd, makers):
        distributed = hvd.DistributedOptimizer(make())
        assert type(distributed).__name__ == type(make()).__name__
        same(trained(distributed, own(hvd), True), trained(make(), means(), True))


@case
def pairs_are_applied_as_lists_are(hvd: types.ModuleType) -> None:
    distributed, into = hvd.DistributedOptimizer(optimizers.Adam(0.1)), variables()
    for step in own(hvd):
        distributed.apply_gradients(zip(map(tf.constant, step), into, strict=True))
    same([one.numpy() for one in into], trained(optimizers.Adam(0.1), means())[: len(SHAPES)])
    assert int(distributed.iterations) == 3


@once
def weights_without_decay_stay_so(hvd: types.ModuleType) -> None:
    def make(into: list[Any]) -> Any:
        optimizer = optimizers.AdamW(0.1, weight_decay=0.5)
        optimizer.exclude_from_weight_decay(var_list=into[:1])
        return optimizer

    mine, its = variables(), variables()
    same(trained(hvd.DistributedOptimizer(make(mine)), own(hvd), into=mine), trained(make(its), means(), into=its))


@case
def gradients_are_summed(hvd: types.ModuleType) -> None:
    sums = [[value * 2 for value in step] for step in means()]
    same(
        trained(hvd.DistributedOptimizer(optimizers.SGD(0.1), op=hvd.Sum), own(hvd)), trained(optimizers.SGD(0.1), sums)
    )


@case
def gradients_are_predivided_grouped_and_compressed(hvd: types.ModuleType) -> None:
    exact = trained(optimizers.SGD(0.1), means())
    for arguments in ({"gradient_predivide_factor": 4.0}, {"groups": 2}, {"groups": 5}, {"num_groups": 1}):
        same(trained(hvd.DistributedOptimizer(optimizers.SGD(0.1), **arguments), own(hvd), True), exact)
    into = variables()
    for groups in ([[into[0], into[2]]], [[into[2]], [into[1], into[0]]]):
        into[0].assign(variables()[0]), into[1].assign(variables()[1]), into[2].assign(variables()[2])
        same(trained(hvd.DistributedOptimizer(optimizers.SGD(0.1), groups=groups), own(hvd), into=into), exact)
    compressed = trained(hvd.DistributedOptimizer(optimizers.SGD(0.1), compression=hvd.Compression.fp16), own(hvd))
    same(compressed, exact, 2e-3)
    assert not np.array_equal(compressed[0], exact[0])


@once
def bfloat16_gradients_are_averaged(hvd: types.ModuleType) -> None:
    into = [keras.Variable(np.zeros(3), dtype="bfloat16")]
    optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0))
    optimizer.apply([tf.cast([1.0, 2.0, 4.0 * hvd.rank()], tf.bfloat16)], into)
    np.testing.assert_array_equal(tf.cast(into[0].value, tf.float32), [-1, -2, -2])


@case
def process_sets_reduce_among_themselves(hvd: types.ModuleType) -> None:
    tensorflow = importlib.import_module("horovod.tensorflow")
    alone = [tensorflow.add_process_set([rank]) for rank in range(2)]
    try:
        mine = hvd.DistributedOptimizer(optimizers.SGD(0.1), process_set=alone[hvd.rank()])
        same(trained(mine, own(hvd)), trained(optimizers.SGD(0.1), own(hvd)))
    finally:
        for one in alone:
            tensorflow.remove_process_set(one)


@case
def local_variables_keep_their_gradients(hvd: types.ModuleType) -> None:
    for scale in (True, False):
        for passes in (1, 2):
            into = variables()
            optimizer = hvd.DistributedOptimizer(
                optimizers.SGD(0.5), scale_local_gradients=scale, backward_passes_per_step=passes
            )
            optimizer.register_local_var(into[1])
            mixed = []
            for step in range(2):
                local = gradients(hvd.rank(), step)[1] * np.float32(0.5 if scale else 1.0)
                mixed.append([mean(step)[0], local, mean(step)[2]])
            trained(optimizer, own(hvd, 2), into=into)
            wanted = trained(optimizers.SGD(0.5), mixed)
            same([one.numpy() for one in into], wanted[: len(SHAPES)], 1e-6)


@case
def layers_are_local_by_partial(hvd: types.ModuleType) -> None:
    layers = [keras.layers.Dense(2), keras.layers.Dense(2)]
    for layer in layers:
        layer.build((None, 2))
    optimizer = hvd.PartialDistributedOptimizer(
        optimizers.SGD(1.0), local_layers=layers[0], scale_local_gradients=False
    )
    into = [*layers[0].trainable_weights, *layers[1].trainable_weights]
    before = [one.numpy() for one in into]
    optimizer.apply([tf.fill(one.shape, float(hvd.rank())) for one in into], into)
    changes = [float(np.mean(old - new.numpy())) for old, new in zip(before, into, strict=True)]
    np.testing.assert_allclose(changes, [hvd.rank(), hvd.rank(), 0.5, 0.5], atol=1e-6)


@case
def backward_passes_are_summed_up(hvd: types.ModuleType) -> None:
    for average, in_function in ((False, False), (False, True), (True, True)):
        optimizer = hvd.DistributedOptimizer(
            optimizers.Adam(0.1, clipnorm=1.0), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        pairs = []
        for step in (0, 2):
            total = [one + other for one, other in zip(mean(step), mean(step + 1), strict=True)]
            pairs.append([value * np.float32(0.5 if average else 1.0) for value in total])
        # Horovod counts each backward pass, and so Adam's corrections see it.
        plain, wanted = optimizers.Adam(0.1, clipnorm=1.0), variables()
        plain.build(wanted)
        for number, total in enumerate(pairs):
            plain.iterations.assign(2 * number + 1)
            trained(plain, [total], into=wanted)
        into = variables()
        five = trained(optimizer, own(hvd, 5), in_function, into)
        same(five[: len(SHAPES)], [one.numpy() for one in wanted], 1e-6)
        assert int(optimizer.iterations) == 5
        assert int(optimizer._agg_helper.counter) == 1


@once
def a_variable_may_have_no_gradient(hvd: types.ModuleType) -> None:
    for passes in (1, 2):
        steps = [[step[0], None, step[2]] for step in own(hvd, 2)]
        optimizer = hvd.DistributedOptimizer(optimizers.SGD(0.1), backward_passes_per_step=passes)
        plain = trained(optimizers.SGD(0.1), [[step[0], None, step[2]] for step in means(2)])
        same(trained(optimizer, steps)[: len(SHAPES)], plain[: len(SHAPES)], 1e-6)


@once
def slices_are_gathered_or_made_dense(hvd: types.ModuleType) -> None:
    def slices(rank: int, step: int) -> tf.IndexedSlices:
        values = np.random.default_rng([rank, step]).standard_normal((3 + rank, 3)).astype("float32")
        return tf.IndexedSlices(tf.constant(values), tf.constant([0, 2, 2, 1][: 3 + rank]), tf.constant((4, 3)))

    def dense(step: int) -> np.ndarray:
        return (tf.convert_to_tensor(slices(0, step)) + tf.convert_to_tensor(slices(1, step))).numpy() / 2

    first = [[step[0], step[1], slices(hvd.rank(), number)] for number, step in enumerate(own(hvd))]
    wanted = [[step[0], step[1], dense(number)] for number, step in enumerate(means())]
    for make in (lambda: optimizers.SGD(0.1, momentum=0.9), lambda: optimizers.Adam(0.1)):
        for arguments in (
            {"sparse_as_dense": True},
            {},
            {"groups": 1},
            {"gradient_predivide_factor": 2.0},
        ):
            got = trained(hvd.DistributedOptimizer(make(), **arguments), first, in_function=True)
            # A row without a gradient has its momentum all the same: row 3, above all.
            same(got, trained(make(), wanted), 1e-5)
    with raises(ValueError, match="sparse_as_dense"):
        trained(hvd.DistributedOptimizer(optimizers.SGD(0.1), backward_passes_per_step=2), first)
    passes = hvd.DistributedOptimizer(optimizers.SGD(0.1), backward_passes_per_step=2, sparse_as_dense=True)
    total = [one + other for one, other in zip(wanted[0], wanted[1], strict=True)]
    same(trained(passes, first[:2])[: len(SHAPES)], trained(optimizers.SGD(0.1), [total])[: len(SHAPES)], 1e-6)


@once
def gradients_are_computed_and_reduced_once(hvd: types.ModuleType) -> None:
    for arguments in ({}, {"skip_gradients_aggregation": True}, {"experimental_aggregate_gradients": False}):
        weight = keras.Variable([1.0, 2.0])
        optimizer = hvd.DistributedOptimizer(optimizers.SGD(1.0), op=hvd.Sum)
        pairs = optimizer.compute_gradients(lambda w=weight: tf.reduce_sum(w * (hvd.rank() + 1.0)), [weight])
        np.testing.assert_array_equal(pairs[0][0], [3, 3])
        optimizer.apply_gradients(list(pairs) if arguments else pairs, **arguments)
        np.testing.assert_array_equal(weight, [-2, -1])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(weight * hvd.rank())
    assert float(optimizer.compute_gradients(loss, [weight], tape=tape)[0][0][0]) == 1


@once
def an_optimizer_wrapped_twice_reduces_once(hvd: types.ModuleType) -> None:
    sums = [[value * 2 for value in step] for step in means()]
    twice = hvd.DistributedOptimizer(hvd.DistributedOptimizer(optimizers.SGD(0.1)), op=hvd.Sum)
    same(trained(twice, own(hvd)), trained(optimizers.SGD(0.1), sums))


@once
def the_state_of_an_optimizer_is_kept(hvd: types.ModuleType) -> None:
    into, its = variables(), variables()
    optimizer, plain = optimizers.Adam(0.1), optimizers.Adam(0.1)
    trained(optimizer, means(2), into=into)
    trained(plain, means(2), into=its)
    same(trained(hvd.DistributedOptimizer(optimizer), own(hvd), into=into), trained(plain, means(), into=its))


@once
def two_optimizers_share_a_function(hvd: types.ModuleType) -> None:
    first, second, one, other = optimizers.SGD(0.1), optimizers.SGD(0.1), variables(), variables()
    first, second = hvd.DistributedOptimizer(first), hvd.DistributedOptimizer(second)

    @tf.function
    def both(values: list[Any]) -> None:
        first.apply(values, one)
        second.apply([value * 2 for value in values], other)

    for step in own(hvd):
        both([tf.constant(value) for value in step])
    same([v.numpy() for v in one], trained(optimizers.SGD(0.1), means())[: len(SHAPES)])
    same([v.numpy() for v in other], trained(optimizers.SGD(0.2), means())[: len(SHAPES)], 1e-6)


@once
def an_elastic_job_asks_how_many_ranks_there_are(hvd: types.ModuleType) -> None:
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        same(
            trained(hvd.DistributedOptimizer(optimizers.SGD(0.1)), own(hvd), True),
            trained(optimizers.SGD(0.1), means()),
        )
        into = [keras.Variable(np.zeros((3, 2)))]
        words = tf.IndexedSlices(tf.ones((2, 2)), tf.constant([0, 1 + hvd.rank()]), tf.constant([3, 2]))
        trained(hvd.DistributedOptimizer(optimizers.SGD(1.0)), [[words]], True, into)
        np.testing.assert_array_equal(into[0].numpy(), [[-1, -1], [-0.5, -0.5], [-0.5, -0.5]])
    finally:
        del os.environ["HOROVOD_ELASTIC"]


# Infinite gradients


@once
def infinite_gradients_reach_all_ranks(hvd: types.ModuleType) -> None:
    steps = own(hvd, 1)
    if hvd.rank() == 1:
        steps[0][0][0, 0], steps[0][2][1, 1] = np.inf, np.nan
    after = trained(hvd.DistributedOptimizer(optimizers.SGD(0.1)), steps)
    assert np.isinf(after[0][0, 0]), after[0]
    assert np.isnan(after[2][1, 1]), after[2]
    assert np.isfinite(after[1]).all()


@once
def ranks_skip_a_step_together(hvd: types.ModuleType) -> None:
    def around(optimizer: Any) -> Any:
        return optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)

    for make in (
        lambda: around(hvd.DistributedOptimizer(optimizers.SGD(0.1, momentum=0.9))),
        lambda: hvd.DistributedOptimizer(around(optimizers.SGD(0.1, momentum=0.9))),
        lambda: around(hvd.DistributedOptimizer(optimizers.SGD(0.1, momentum=0.9), backward_passes_per_step=2)),
        lambda: hvd.DistributedOptimizer(around(optimizers.SGD(0.1, momentum=0.9)), backward_passes_per_step=2),
    ):
        for in_function in (True,):
            optimizer, into = make(), variables()
            aggregation = getattr(optimizer, "_agg_helper", None) or getattr(
                getattr(optimizer, "inner_optimizer", None), "_agg_helper", None
            )
            passes = 1 if aggregation is None else 2
            steps = []
            for step in own(hvd, 3):
                steps += [step] + [[value * 0 for value in step]] * (passes - 1)
            bad = [value.copy() for value in steps[0]]
            if hvd.rank() == 1:
                bad[0][0, 0] = np.nan
            nothing = [[value * 0 for value in bad]] * (passes - 1)
            trained(optimizer, [bad, *nothing], in_function, into)
            same([one.numpy() for one in into], [one.numpy() for one in variables()])
            assert float(optimizer.dynamic_scale) == 2.0
            trained(optimizer, steps, in_function, into)
            half = [[value / 2 for value in step] for step in means()]
            wanted = trained(optimizers.SGD(0.1, momentum=0.9), half)
            same([one.numpy() for one in into], wanted[: len(SHAPES)], 1e-6)


# Models


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
    with raises(ValueError, match="jit_compile=False"):
        fit(model(hvd.DistributedOptimizer(optimizers.SGD(0.1)), jit_compile=True), hvd.rank())


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


# Files


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
    for make, custom in (
        (lambda: optimizers.Adam(0.01), {}),
        (lambda: Registered(0.01), {}),
        (lambda: Unregistered(0.5, learning_rate=0.01), {"Unregistered": Unregistered}),
    ):
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


# Callbacks


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
    for momentum_correction in (True, False):
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
    for weights_only, name in ((False, "best.keras"), (True, "best.weights.h5")):
        for later in (True, False):
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
            (folder / name).unlink()


# Values


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


# Elastic


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


def main() -> None:
    chosen = sys.argv[1:]
    for name in FRONT_ENDS:
        front_end = importlib.import_module(name)
        front_end.init()
        for one in CASES:
            if (chosen and one.__name__ not in chosen) or (one.__name__ in ONCE and name != FRONT_ENDS[-1]):
                continue
            started = time.monotonic()
            try:
                one(front_end)
                outcome = "passed"
            except Exception:
                outcome = repr(traceback.format_exc())
            print(f"case {name} {one.__name__} {outcome}", flush=True)
            print(f"{time.monotonic() - started:.1f} s", flush=True)
    front_end.shutdown()


if __name__ == "__main__":
    main()
