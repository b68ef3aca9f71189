"""Collectives inside a function that XLA compiles for the CPU."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import tensorflow as tf
from cases import gradients, mean, plain, raises, same, trained_by_hand, variables


def compiled(function: Any) -> Any:
    return tf.function(function, jit_compile=True)


def value(rank: int, rows: int = 3) -> np.ndarray:
    return np.random.default_rng([rank, rows]).standard_normal((rows, 5)).astype("float32")


@plain
def xla_compiles_collectives_of_a_known_shape(hvd: types.ModuleType) -> None:
    rank, every = hvd.rank(), [value(0), value(1)]
    total, mine = every[0] + every[1], tf.constant(every[rank])
    share = slice(2) if rank == 0 else slice(2, 3)
    for op, wanted in ((hvd.Sum, total), (hvd.Average, total / 2), (hvd.Min, np.minimum(*every))):
        same([compiled(lambda x, op=op: 2 * hvd.allreduce(x, op=op))(mine)], [2 * wanted])
    scaled = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=-3.0))
    same([scaled(mine)], [-1.5 * total], 1e-6)
    same(compiled(lambda x: hvd.grouped_allreduce([x, x[:1]], op=hvd.Sum))(mine), [total, total[:1]])
    same([compiled(lambda x: hvd.broadcast(x, 1))(mine)], [every[1]])
    same([compiled(lambda x: hvd.reducescatter(x, op=hvd.Sum))(mine)], [total[share]])
    same(compiled(lambda x: hvd.grouped_reducescatter([x, -x], op=hvd.Sum))(mine), [total[share], -total[share]])
    for dtype in ("bfloat16", "float16", "float64", "int32", "int64", "uint8", "int8"):
        got = compiled(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.cast([1 + rank, 5], dtype))
        assert got.dtype == dtype
        same([tf.cast(got, tf.float32)], [[3, 10]])


@plain
def xla_compiles_many_collectives_that_run_in_any_order(hvd: types.ModuleType) -> None:
    """More than a thread pool has threads: none of them waits for a collective."""
    x = tf.constant(value(hvd.rank(), 300))

    @compiled
    def added(x: Any) -> Any:
        return tf.add_n([hvd.allreduce(x * float(i), op=hvd.Sum, name=f"many.{i}") for i in range(40)])

    wanted = 780 * (value(0, 300) + value(1, 300))
    for _ in range(20):
        same([added(x)], [wanted], 2e-3)


@plain
def xla_compiles_a_loop_and_gradients(hvd: types.ModuleType) -> None:
    rank = hvd.rank()

    @compiled
    def looped(x: Any) -> Any:
        return tf.while_loop(lambda i, _: i < 4, lambda i, x: (i + 1, hvd.allreduce(x, op=hvd.Sum)), (0, x))[1]

    same([looped(tf.ones(3) * (rank + 1))], [np.full(3, 24.0)])

    @compiled
    def gradient(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(hvd.allreduce(x, op=hvd.Sum) * (rank + 1.0))
        return tape.gradient(loss, x)

    same([gradient(tf.ones(3))], [np.full(3, 3.0)])


@plain
def xla_compiles_a_step_of_training(hvd: types.ModuleType) -> None:
    into = variables()

    @compiled
    def reduced() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(one * g) for one, g in zip(into, gradients(hvd.rank(), 0), strict=True)])
        return hvd.DistributedGradientTape(tape).gradient(loss, into)

    same(reduced(), mean(0))

    same(trained_by_hand(hvd, True, jit_compile=True), trained_by_hand(hvd, False, jit_compile=True), 5e-5)


@plain
def what_xla_cannot_compile_is_named(hvd: types.ModuleType) -> None:
    with raises(tf.errors.InvalidArgumentError, match="HorovodAllgather"):
        compiled(lambda x: hvd.allgather(x))(tf.ones(3))
    # An error reaches the caller, and later collectives work.
    with raises(tf.errors.OpError, match="[Mm]ismatched"):
        compiled(lambda x: hvd.allreduce(x, name="unlike"))(tf.ones(2 + hvd.rank()))
    same([compiled(lambda x: hvd.allreduce(x, op=hvd.Sum))(tf.ones(2))], [[2, 2]])
