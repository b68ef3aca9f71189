"""An adapter for core's tests, which run on it in milliseconds: softmax regression in NumPy, one process."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.seam import AnyLoss
from hvdkit.core.tensors import Scalar
from hvdkit.core.trainable import Trainable
from hvdkit.data.dataset import Batch
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss
from hvdkit.tasks.image_classification import cross_entropy as cross_entropies
from tests.numpy_adapter import NumpyAdapter


class Linear:
    """Softmax regression on the pixels, in float64: the smallest model that can be trained."""

    def __init__(self, features: int, classes: int) -> None:
        self.parameters = {"fc.weight": np.zeros((classes, features)), "fc.bias": np.zeros(classes)}

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """(n, height, width, channels) -> logits (n, classes)."""
        logits: np.ndarray = inputs.reshape(len(inputs), -1) @ self.parameters["fc.weight"].T
        return logits + self.parameters["fc.bias"]

    def gradients(self, inputs: np.ndarray, error: np.ndarray) -> dict[str, np.ndarray]:
        """Gradients by parameter; `error` (n, classes) is d loss / d logits."""
        return {"fc.weight": error.T @ inputs.reshape(len(inputs), -1), "fc.bias": error.sum(axis=0)}


class TrainableModel(Trainable):
    """A `Linear` model in training."""

    def __init__(self, model: Linear, loss: AnyLoss) -> None:
        if not isinstance(loss, Loss):
            raise RequestError("loss: expected a recipe's loss, as the local adapter differentiates no functions")
        self.model, self._smoothing = model, loss.label_smoothing
        self.parameters = model.parameters

    def inputs(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        return batch.inputs, batch.targets

    def backward(
        self, inputs: np.ndarray, targets: np.ndarray, scale: Scalar | None
    ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        logits, count = self.model(inputs), len(targets)
        classes = logits.shape[1]
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        target = np.eye(classes)[targets] * (1 - self._smoothing) + self._smoothing / classes
        self.stamp((trace_events.FORWARD,), [logits])
        gradients = self.model.gradients(inputs, (shares - target) / count)
        for name in gradients:
            trace_events.mark(trace_events.READY + name)
        every = [cross_entropies(logits, np.full(count, label)) for label in range(classes)]
        loss = (1 - self._smoothing) * cross_entropies(logits, targets).mean() + self._smoothing * np.mean(every)
        return logits, np.asarray(loss), gradients

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        return self.model(inputs)

    def losses(self, batch: Batch) -> np.ndarray:
        return cross_entropies(self.model(batch.inputs), batch.targets)


class LocalAdapter(NumpyAdapter):
    """As `NumpyAdapter`, with a `Linear` model, and in results the name "local"."""

    NAME = "local"
    CAPABILITIES = frozenset(
        {"fp64", "float16", "float32", "float64", "int32", "int64", "int8", "uint8", "scalars", "empty"}
    )
    CHOSEN: Mapping[str, Mapping[str, tuple[str, str]]] = {"cpu": {}}

    def sqrt(self, tensor: np.ndarray) -> np.ndarray:
        return np.asarray(np.sqrt(tensor))

    def bind(self, model: Linear, loss: AnyLoss, precision: str) -> Trainable:
        return TrainableModel(model, loss)


adapter = LocalAdapter()
