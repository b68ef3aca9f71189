"""The adapter for Keras 3 on TensorFlow (`hvdkit/core/seam.py`): training uses `model.fit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.adapters import capabilities
from hvdkit.adapters import tensorflow as tf_adapter
from hvdkit.adapters.keras import timing, training
from hvdkit.adapters.tensorflow import (
    allgather,
    allgather_object,
    allreduce,
    alltoall,
    broadcast,
    cast,
    cross_entropy,
    dtype,
    from_numpy,
    init,
    placed,
    process_set,
    reducescatter,
    shutdown,
    synchronize,
    tensors,
    to_numpy,
)
from hvdkit.adapters.trainable import check_synchronized
from hvdkit.core.seam import AnyLoss, Observer, Session

import keras  # isort: skip  # after the other adapter, which sets TensorFlow's log level

if TYPE_CHECKING:
    from hvdkit.core.synchronized import StatisticsOf

NAME = "keras"
CAPABILITIES = capabilities.CAPABILITIES[NAME]
CHOSEN = capabilities.CHOSEN[NAME]

__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "bind",
    "broadcast",
    "cast",
    "cross_entropy",
    "dtype",
    "from_numpy",
    "init",
    "observer",
    "placed",
    "process_set",
    "reducescatter",
    "seed",
    "shutdown",
    "synchronize",
    "synchronize_batch_norms",
    "tensors",
    "to_numpy",
    "versions",
]  # fmt: skip


def versions() -> dict[str, str]:
    both = tf_adapter.versions()
    return both | {"framework": keras.__version__, "tensorflow": both["framework"]}


def seed(value: int) -> None:
    keras.utils.set_random_seed(value)
    training.reseed(value)


def random_states() -> dict[str, np.ndarray]:
    """The states of the random layers of all models."""
    return {f"keras.{number}": np.array(state.value) for number, state in enumerate(training.seed_states())}


def load_random_states(states: Mapping[str, np.ndarray]) -> None:
    """Draw on from what `random_states` has returned."""
    for number, state in enumerate(training.seed_states()):
        if (found := states.get(f"keras.{number}")) is not None:
            state.assign(found)


def synchronize_batch_norms(model: keras.Model, statistics: StatisticsOf, every: bool) -> list[str]:
    from hvdkit.adapters.keras import synchronized  # most runs do not need it

    return synchronized.synchronize_batch_norms(model, statistics, every)


def bind(model: keras.Model, loss: AnyLoss, precision: str) -> training.TrainableModel:
    synchronized = (layer for layer in model._flatten_layers() if getattr(layer, "synchronized", False))
    check_synchronized(tf_adapter.hvd, (layer.name for layer in synchronized if "_moments" not in vars(layer)))
    return training.TrainableModel(model, loss, precision)


def observer(session: Session) -> Observer:
    return timing.Observer(tf_adapter.hvd, session)
