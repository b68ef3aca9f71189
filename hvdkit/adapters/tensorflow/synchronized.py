"""Synchronized batch norm for TensorFlow (`hvdkit/adapters/batch_statistics.py`).

Horovod's operations are not stateful: TensorFlow merges equal ones with equal inputs, and leaves out those whose result
nobody uses, on all ranks alike.
"""

from __future__ import annotations

import tensorflow as tf

from hvdkit.adapters.batch_statistics import StatisticsOf, claims, refusal
from hvdkit.adapters.tensorflow.batch_norm import BatchNorm
from hvdkit.adapters.tensorflow.training import check_kind
from hvdkit.core.state import canonical_name, is_statistic, layer_of

_REMEDY = "make it a hvdkit.adapters.tensorflow.batch_norm.BatchNorm"


def synchronize_batch_norms(model: tf.Module, statistics: StatisticsOf, every: bool) -> list[str]:
    """`core.seam.Adapter.synchronize_batch_norms`, of hvdkit's `BatchNorm`; others are refused."""
    check_kind(model)
    done, known = [], set()
    for layer in model.submodules:
        if isinstance(layer, BatchNorm):
            known |= {id(layer.mean), id(layer.variance)}
            if every:
                layer.over_ranks = statistics(layer.label)
                done.append(layer.label)
        elif claims(layer):
            raise refusal(layer.name, type(layer), "this batch norm is none of hvdkit's, and not synchronized", _REMEDY)
    for variable in model.variables if every else ():
        name = canonical_name(variable.name.removesuffix(":0"))
        if is_statistic(name) and id(variable) not in known:
            why = "these running statistics belong to a batch norm that is none of hvdkit's, and not synchronized"
            raise refusal(layer_of(name), type(variable), why, _REMEDY)
    return done
