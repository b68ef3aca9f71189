"""Functions that backward computes again in TensorFlow, with the same masks of dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from hvdkit.errors import RequestError

Function = Callable[[tf.Tensor], Any]  # the outputs, one or several
_RANDOM = ("Random", "Normal", "Uniform")  # in the types of operations
_seeds: list[tf.Tensor] = []  # of the function that is traced: its next mask's


def recomputed(function: Function) -> Function:
    """The function as `tf.recompute_grad` has it, in which `dropout` draws the same masks again.

    Raises RequestError where it draws other random numbers, of which backward would draw new ones.
    """

    def call(x: tf.Tensor) -> Any:
        first = tf.random.uniform([2], maxval=tf.int32.max, dtype=tf.int32)

        def seeded(x: tf.Tensor) -> Any:
            known = len(tf.compat.v1.get_default_graph().get_operations())
            _seeds[:] = [first]
            outputs = function(x)
            _seeds.clear()
            for operation in tf.compat.v1.get_default_graph().get_operations()[known:]:
                if operation.op_def.is_stateful and any(word in operation.type for word in _RANDOM):
                    raise RequestError(
                        f"recompute: {operation.name} would draw other numbers in backward; use `dropout` of "
                        "hvdkit.adapters.tensorflow.recompute, one of tf.random.stateless_…, or recompute=false"
                    )
            return outputs

        return tf.recompute_grad(seeded)(x)

    return call


def dropout(x: tf.Tensor, rate: float) -> tf.Tensor:
    """As `tf.nn.dropout`, also within functions that are computed again."""
    if not _seeds:
        return tf.nn.dropout(x, rate)
    (seed,) = _seeds
    _seeds[:] = [seed + tf.constant([0, 1])]
    return tf.nn.experimental.stateless_dropout(x, rate, seed)
