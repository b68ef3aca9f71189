"""Synchronized batch norm for Keras (`hvdkit/adapters/batch_statistics.py`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdkit.adapters.batch_statistics import BatchStatistics, StatisticsOf, claims, refusal
from hvdkit.adapters.tensorflow.batch_norm import moments

_KERAS = keras.layers.BatchNormalization
_REMEDY = "give it a keras.layers.BatchNormalization in its place"


def synchronize_batch_norms(model: keras.Model, statistics: StatisticsOf, every: bool) -> list[str]:
    """`core.seam.Adapter.synchronize_batch_norms`: layers get the statistics in place of their batch's moments.

    Collectives have the layer's number in the model: Keras's own names count all layers of the process.
    """
    done: list[str] = []
    for layer in model._flatten_layers():
        claiming = claims(layer) or bool(getattr(layer, "synchronized", False))
        if not (claiming or (every and isinstance(layer, _KERAS))):
            continue
        of_layer = statistics(str(len(done)))
        done.append(layer.path or layer.name)
        if hasattr(type(layer), "over_ranks"):  # hvdkit's own
            object.__setattr__(layer, "over_ranks", of_layer)
            continue
        _check(layer)
        if of_layer is not None:
            object.__setattr__(layer, "_moments", partial(_moments, layer, of_layer))
    return done


def _check(layer: Any) -> None:
    kind = type(layer)
    if not isinstance(layer, _KERAS):
        raise refusal(layer.name, kind, "this batch norm is none of Keras's, and cannot be synchronized", _REMEDY)
    for method in ("call", "_moments"):
        ours = getattr(hvd.SyncBatchNormalization, method), getattr(_KERAS, method)
        if getattr(kind, method) not in ours:
            raise refusal(layer.name, kind, f"it has a `{method}` of its own, so it cannot be synchronized", _REMEDY)


def _moments(
    layer: Any, statistics: BatchStatistics, inputs: tf.Tensor, mask: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor]:
    """`BatchNormalization._moments` over all ranks: the mean and biased variance (channels,)."""
    axes = layer._reduction_axes
    if mask is None:
        return moments(inputs, axes, statistics)[:2]
    mask = tf.expand_dims(tf.cast(mask, tf.bool), -1)
    mean, variance, count = moments(inputs, axes, statistics, mask)
    count = tf.cast(count, inputs.dtype)
    share = count / (count + keras.config.epsilon())  # Keras divides by a little more than the number of values
    return mean * share, (variance + tf.square(mean - mean * share)) * share
