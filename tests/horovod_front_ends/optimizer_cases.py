"""Distributed Keras optimizers."""

from __future__ import annotations

import importlib
import os
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from cases import SHAPES, case, gradients, its_share, mean, means, once, own, raises, same, trained, variables
from keras import optimizers


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
def gradients_are_summed_and_once_by_an_optimizer_that_is_wrapped_twice(hvd: types.ModuleType) -> None:
    sums = trained(optimizers.SGD(0.1), [[value * 2 for value in step] for step in means()])
    for optimizer in (optimizers.SGD(0.1), hvd.DistributedOptimizer(optimizers.SGD(0.1))):
        same(trained(hvd.DistributedOptimizer(optimizer, op=hvd.Sum), own(hvd)), sums)


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
        trained(optimizer, [bad, *nothing], True, into)
        same([one.numpy() for one in into], [one.numpy() for one in variables()])
        assert float(optimizer.dynamic_scale) == 2.0
        trained(optimizer, steps, True, into)
        half = [[value / 2 for value in step] for step in means()]
        wanted = trained(optimizers.SGD(0.1, momentum=0.9), half)
        same([one.numpy() for one in into], wanted[: len(SHAPES)], 1e-6)
