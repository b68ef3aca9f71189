"""horovod.tensorflow with Keras 3's variables: tapes, local variables, broadcasts, normalization, gradients."""

from __future__ import annotations

import os
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import SHAPES, data, everyones_data, gradients, mean, plain, raises, same, trained_by_hand, variables


@contextmanager
def sets_of_one(hvd: types.ModuleType) -> Iterator[list[Any]]:
    alone = [hvd.add_process_set([rank]) for rank in range(2)]
    try:
        yield alone
    finally:
        for one in alone:
            hvd.remove_process_set(one)


@contextmanager
def elastic() -> Iterator[None]:
    os.environ["HOROVOD_ELASTIC"] = "1"
    try:
        yield
    finally:
        del os.environ["HOROVOD_ELASTIC"]


def taped(into: list[Any], rank: int) -> tuple[tf.GradientTape, Any]:
    """A tape, and a loss whose gradients are `gradients(rank, 0)`."""
    with tf.GradientTape() as tape:
        weighted = [tf.reduce_sum(one * value) for one, value in zip(into, gradients(rank, 0), strict=True)]
        loss = tf.add_n(weighted)
    return tape, loss


# Tapes


@plain
def a_tape_averages_for_variables_of_keras_and_tensorflow(hvd: types.ModuleType) -> None:
    for into in (variables(), [tf.Variable(one.numpy()) for one in variables()]):
        for in_function in (False, True):

            def averaged(**arguments: Any) -> Any:
                tape, loss = taped(into, hvd.rank())  # noqa: B023
                return hvd.DistributedGradientTape(tape, **arguments).gradient(loss, into)  # noqa: B023

            same((tf.function(averaged) if in_function else averaged)(), mean(0))
        same(averaged(op=hvd.Sum), [2 * value for value in mean(0)])
        same(averaged(gradient_predivide_factor=4.0), mean(0), 1e-6)
        same(averaged(compression=hvd.Compression.fp16), mean(0), 2e-3)
        with elastic():
            same(averaged(), mean(0))
        with sets_of_one(hvd) as alone:
            same(averaged(process_set=alone[hvd.rank()]), gradients(hvd.rank(), 0))


@plain
def a_tape_reduces_groups_of_variables_with_the_same_name(hvd: types.ModuleType) -> None:
    # Horovod as released pairs a group's variables with gradients by name, and loses all but one gradient of a name.
    for into in (variables(), [tf.Variable(one.numpy(), name="kernel") for one in variables()]):
        for groups in ([[into[0], into[2]]], [[into[2]], [into[1], into[0]]], 2):
            tape, loss = taped(into, hvd.rank())
            same(hvd.DistributedGradientTape(tape, groups=groups).gradient(loss, into), mean(0))
    unused = keras.Variable([1.0])
    tape, loss = taped(into, hvd.rank())
    groups = [[unused], [into[0], unused]]
    found = hvd.DistributedGradientTape(tape, groups=groups).gradient(loss, [*into, unused])
    same(found[:-1], mean(0))
    assert found[-1] is None


@plain
def a_tape_takes_and_gives_one_source_or_a_structure(hvd: types.ModuleType) -> None:
    into = variables()
    tape, loss = taped(into, hvd.rank())
    same([hvd.DistributedGradientTape(tape).gradient(loss, into[1])], [mean(0)[1]])
    tape, loss = taped(into, hvd.rank())
    found = hvd.DistributedGradientTape(tape).gradient(loss, {"a": into[0], "b": (into[1], into[2])})
    same([found["a"], *found["b"]], mean(0))


@plain
def a_tape_leaves_local_sources_alone(hvd: types.ModuleType) -> None:
    for scale in (True, False):
        into = variables()
        tape, loss = taped(into, hvd.rank())
        distributed = hvd.DistributedGradientTape(tape, scale_local_gradients=scale)
        distributed.register_local_source(into[1])
        with elastic() if scale else sets_of_one(hvd):
            local, shared = distributed.get_local_and_global_gradients(loss, into)
        assert [one for one, _ in local] == [into[1]]
        assert [one for one, _ in shared] == [into[0], into[2]]
        own = gradients(hvd.rank(), 0)[1]
        same([local[0][1], shared[0][1], shared[1][1]], [own / 2 if scale else own, mean(0)[0], mean(0)[2]])


@plain
def a_partial_tape_keeps_the_gradients_of_local_layers(hvd: types.ModuleType) -> None:
    words = np.random.default_rng(hvd.rank()).integers(10, size=(4, 3))
    for kind in ("one", "several", "none"):
        made = keras.Sequential([keras.layers.Embedding(10, 2), keras.layers.Flatten(), keras.layers.Dense(1)])
        made.build((None, 3))
        layers = {"one": made.layers[0], "several": made.layers[:2], "none": None}[kind]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(made(words))
        own = tf.GradientTape.gradient
        with tf.GradientTape() as again:
            same_loss = tf.reduce_sum(made(words))
        alone = [tf.convert_to_tensor(one) for one in own(again, same_loss, made.trainable_variables)]
        found = hvd.PartialDistributedGradientTape(tape, local_layers=layers).gradient(loss, made.trainable_variables)
        averages = [hvd.allreduce(one) for one in alone]
        wanted = [averages[0] if kind == "none" else alone[0] / 2, *averages[1:]]
        assert isinstance(found[0], tf.IndexedSlices)
        same([tf.convert_to_tensor(one) for one in found], wanted, 1e-6)
    with raises(ValueError, match="Layer"):
        hvd.PartialDistributedGradientTape(tape, local_layers=[1])


@plain
def a_loop_of_ones_own_trains_as_one_process_does_with_all_data(hvd: types.ModuleType) -> None:
    same(trained_by_hand(hvd, True), trained_by_hand(hvd, False), 2e-5)


# Optimizers of TensorFlow 1


@plain
def an_optimizer_of_tensorflow_1_has_local_variables(hvd: types.ModuleType) -> None:
    own, average = gradients(hvd.rank(), 0), mean(0)
    for passes, scale in ((1, True), (1, False), (2, True), (2, False)):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            into = [
                tf.compat.v1.get_variable(f"v{i}", shape, initializer=tf.compat.v1.zeros_initializer())
                for i, shape in enumerate(SHAPES)
            ]
            unused = tf.compat.v1.get_variable("unused", (2,))
            loss = tf.add_n([tf.reduce_sum(one * value) for one, value in zip(into, own, strict=True)])
            optimizer = hvd.DistributedOptimizer(
                tf.compat.v1.train.GradientDescentOptimizer(1.0),
                backward_passes_per_step=passes,
                scale_local_gradients=scale,
            )
            optimizer.register_local_var(into[1])
            pairs = optimizer.compute_gradients(loss, [unused, *into])
            step = optimizer.apply_gradients(pairs)
            session.run([tf.compat.v1.global_variables_initializer(), tf.compat.v1.local_variables_initializer()])
            for _ in range(passes):
                session.run(step)
            local = own[1] / 2 if scale else own[1]
            same(session.run(into), [-passes * value for value in (average[0], local, average[2])], 1e-6)


@plain
def a_hook_broadcasts_the_variables_of_a_graph(hvd: types.ModuleType) -> None:
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("v", initializer=tf.fill([3], float(hvd.rank() + 1)))
        with tf.compat.v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(1)]) as session:
            same([session.run(variable)], [np.full(3, 2.0)])


# Broadcasts


@plain
def variables_are_broadcast_in_and_out_of_place(hvd: types.ModuleType) -> None:
    rank = hvd.rank()
    for inplace in (False, True):
        for root in (0, 1):
            into = [keras.Variable(np.full(shape, rank + 10.0 * i)) for i, shape in enumerate(SHAPES)]
            into.append(keras.Variable(np.arange(3) + rank, dtype="int64"))
            into.append(tf.Variable([float(rank)]))
            hvd.broadcast_variables(into, root_rank=root, inplace=inplace)
            wanted = [np.full(shape, root + 10.0 * i) for i, shape in enumerate(SHAPES)]
            same([one.numpy() for one in into], [*wanted, np.arange(3) + root, [root]])


@plain
def a_model_of_several_types_is_broadcast(hvd: types.ModuleType) -> None:
    keras.utils.set_random_seed(40 + hvd.rank())
    made = keras.Sequential(
        [keras.layers.Input((4,)), keras.layers.Dense(3, dtype="bfloat16"), keras.layers.Dropout(0.5)]
    )
    assert {one.dtype for one in made.variables} == {"bfloat16", "int64"}
    hvd.broadcast_variables(made.variables, root_rank=1)
    for one in made.variables:
        every = hvd.allgather_object(tf.cast(one.value, tf.float64).numpy())
        same([every[0]], [every[1]])


@plain
def an_elastic_state_keeps_variables(hvd: types.ModuleType) -> None:
    into = [keras.Variable([1.0 + hvd.rank()]), keras.Variable([5.0])]
    state = hvd.elastic.TensorFlowState(into, batch=hvd.rank())
    state.sync()
    same([one.numpy() for one in into], [[1], [5]])
    assert state.batch == 0
    into[0].assign([9.0])
    state.restore()
    same([one.numpy() for one in into], [[1], [5]])


# Batch normalization


def normalized(layer: Any, x: np.ndarray, in_function: bool = False, **arguments: Any) -> tuple[Any, list[Any]]:
    """The outputs in training, and the gradients of their sum of cubes: for the inputs, gamma, beta."""

    def call(x: Any) -> tuple[Any, list[Any]]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = layer(x, training=True, **arguments)
            loss = tf.reduce_sum(outputs**3)
        return outputs, tape.gradient(loss, [x, layer.gamma.value, layer.beta.value])

    layer.build(x.shape)
    return (tf.function(call) if in_function else call)(tf.constant(x))


@plain
def batch_normalization_is_that_of_all_batches_together(hvd: types.ModuleType) -> None:
    rank, random = hvd.rank(), np.random.default_rng(5)
    for in_function in (False, True):
        for shape, axis, dtype in (((8, 3), 1, "float32"), ((8, 2, 4, 3), 1, "float32"), ((8, 5, 3), -1, "float64")):
            x = (random.standard_normal(shape) * 3 + 1).astype(dtype)
            part = slice(3) if rank == 0 else slice(3, None)  # 3 rows and 5 rows
            alone = keras.layers.BatchNormalization(axis=axis, momentum=0.5, dtype=dtype)
            layer = hvd.SyncBatchNormalization(axis=axis, momentum=0.5, dtype=dtype)
            outputs, (of_x, of_gamma, of_beta) = normalized(layer, x[part], in_function)
            wanted, (all_x, all_gamma, all_beta) = normalized(alone, x)
            close = 1e-4 if dtype == "float32" else 1e-9
            same([outputs, of_x], [wanted[part], all_x[part]], close)
            same(
                [hvd.allreduce(of_gamma, op=hvd.Sum), hvd.allreduce(of_beta, op=hvd.Sum)], [all_gamma, all_beta], close
            )
            same([layer.moving_mean.numpy()], [alone.moving_mean.numpy()], close)
            same([layer.moving_variance.numpy()], [alone.moving_variance.numpy()], close)
            same([layer(x)], [alone(x)], close)


@plain
def batch_normalization_leaves_out_what_is_masked(hvd: types.ModuleType) -> None:
    x = np.random.default_rng(6).standard_normal((8, 5, 3)).astype("float32")
    mask = np.random.default_rng(7).random((8, 5)) < 0.6
    part = slice(3) if hvd.rank() == 0 else slice(3, None)
    alone, layer = keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
    outputs, _ = normalized(layer, x[part], mask=tf.constant(mask[part]))
    wanted, _ = normalized(alone, x, mask=tf.constant(mask))
    same([outputs], [wanted[part]], 1e-4)


@plain
def a_model_with_batch_normalization_is_fitted_and_saved(hvd: types.ModuleType) -> None:
    def made(layer: Any, optimizer: Any) -> Any:
        keras.utils.set_random_seed(3)
        inputs = keras.layers.Input((4,))
        hidden = layer()(keras.layers.Dense(8)(layer()(inputs)))
        model = keras.Model(inputs, keras.layers.Dense(2)(hidden))
        model.compile(optimizer, "mse")
        return model

    together = made(hvd.SyncBatchNormalization, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))
    alone = made(keras.layers.BatchNormalization, keras.optimizers.SGD(0.1))
    x, y = data(hvd.rank())
    together.fit(x, y, batch_size=8, verbose=0, shuffle=False)
    alone.fit(*everyones_data(), batch_size=16, verbose=0, shuffle=False)
    same(together.get_weights(), alone.get_weights(), 1e-4)
    path = str(Path(tempfile.mkdtemp(dir=os.environ["HVDKIT_RANK_DIR"])) / "model.keras")
    together.save(path)
    again = keras.models.load_model(path, compile=False)
    assert isinstance(again.layers[1], hvd.SyncBatchNormalization)
    same([again(x)], [together(x)])
    with raises(ValueError, match="fused=True"):
        hvd.SyncBatchNormalization(fused=True)


# Collectives of Keras' variables, and their gradients


@plain
def collectives_take_a_variable_of_keras(hvd: types.ModuleType) -> None:
    rank = hvd.rank()
    variable = keras.Variable(np.arange(4.0).reshape(4, 1) + rank)
    rows = np.arange(4.0).reshape(4, 1)
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        same([hvd.allreduce(variable, compression=compression)], [rows + 0.5])
        same(hvd.grouped_allreduce([variable, variable], compression=compression), [rows + 0.5] * 2)
        same(
            [hvd.reducescatter(variable, op=hvd.Sum, compression=compression)],
            [(2 * rows + 1)[2 * rank : 2 * rank + 2]],
        )
    same([hvd.allgather(variable)], [np.concatenate([rows, rows + 1])])
    same([hvd.broadcast(variable, 1)], [rows + 1])
    same([hvd.alltoall(variable)], [np.concatenate([(rows + other)[2 * rank : 2 * rank + 2] for other in range(2)])])


@plain
def reducescatter_has_its_gradient_on_process_sets(hvd: types.ModuleType) -> None:
    rank = hvd.rank()
    with sets_of_one(hvd) as alone:
        for process_set, size, at in ((alone[rank], 1, 0), (hvd.global_process_set, 2, rank)):
            for op, dtype, dims in ((hvd.Sum, "float32", 2), (hvd.Average, "float64", 1), (hvd.Sum, "float16", 3)):
                rows = [2 * size] + [2] * (dims - 1)
                variable = keras.Variable(np.ones(rows), dtype=dtype)
                upstream = tf.cast(tf.fill([2, *rows[1:]], 3.0 + at), dtype)

                arguments = {"op": op, "process_set": process_set, "prescale_factor": 0.5}

                def single() -> Any:
                    with tf.GradientTape() as tape:
                        reduced = hvd.reducescatter(variable, **arguments)  # noqa: B023
                    return tape.gradient(reduced, variable, upstream)  # noqa: B023

                def grouped() -> Any:
                    with tf.GradientTape() as tape:
                        reduced = hvd.grouped_reducescatter([variable, variable], **arguments)  # noqa: B023
                    return tape.gradient(reduced, variable, [upstream, upstream])  # noqa: B023

                factor = 0.5 * (size if op == hvd.Sum else 1)
                every = [3.0] if size == 1 else [3.0, 4.0]
                wanted = np.concatenate([np.full([2, *rows[1:]], value * factor) for value in every])
                for call, times in ((single, 1), (grouped, 2)):
                    same([call(), tf.function(call)()], [times * wanted] * 2)
                    hvd.allreduce(tf.zeros(1))  # no rank removes its process set while the other one uses its own
