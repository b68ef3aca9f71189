"""The adapter for Keras 3 on TensorFlow (`hvdkit/core/seam.py`): training uses `model.fit`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdkit.adapters import capabilities
from hvdkit.adapters.keras import timing, training
from hvdkit.adapters.tensorflow import TensorFlow
from hvdkit.core.seam import AnyLoss, Observer
from hvdkit.core.trainable import Trainable

import keras  # isort: skip  # after the other adapter, which sets TensorFlow's log level

keras.config.disable_traceback_filtering()  # it would write "Exception encountered when calling" before what is wrong


class Keras(TensorFlow):
    """Keras, with TensorFlow's tensors and collectives."""

    NAME = "keras"
    CAPABILITIES = capabilities.CAPABILITIES[NAME]
    CHOSEN = capabilities.CHOSEN[NAME]
    batch_norms = "hvdkit.adapters.keras.synchronized"

    def versions(self) -> dict[str, str]:
        both = super().versions()
        return both | {"framework": keras.__version__, "tensorflow": both["framework"]}

    def seed(self, value: int) -> None:
        keras.utils.set_random_seed(value)
        training.reseed(value)

    def random_states(self) -> dict[str, np.ndarray]:
        """The states of the random layers of all models."""
        return {f"keras.{number}": np.array(state.value) for number, state in enumerate(training.seed_states())}

    def load_random_states(self, states: Mapping[str, np.ndarray]) -> None:
        for number, state in enumerate(training.seed_states()):
            if (value := states.get(f"keras.{number}")) is not None:
                state.assign(value)

    def bind(self, model: keras.Model, loss: AnyLoss, precision: str) -> training.TrainableModel:
        synchronized = (layer for layer in model._flatten_layers() if getattr(layer, "synchronized", False))
        self.check_synchronized(layer.name for layer in synchronized if "_moments" not in vars(layer))
        return training.TrainableModel(model, loss, precision)

    def observer(self, trainable: Trainable) -> Observer:
        if not isinstance(trainable, training.TrainableModel):  # chunks of a pipeline, which core's loop trains
            return super().observer(trainable)
        return timing.Observer(self.horovod, trainable)


adapter = Keras()
