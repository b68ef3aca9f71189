"""An adapter as somebody writes it who knows `hvdkit/core/seam.py` alone: two layers in NumPy, one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdkit.core import trace_events
from hvdkit.core.seam import Adapter, AnyLoss
from hvdkit.core.tensors import Scalar
from hvdkit.core.trainable import Trainable
from hvdkit.data.dataset import Batch
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss


class Network:
    """inputs (n, features) -> tanh of a hidden layer -> logits (n, classes), in float64."""

    def __init__(self, features: int, hidden: int, classes: int, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.parameters = {
            "hidden.weight": random.standard_normal((hidden, features)) / features**0.5,
            "hidden.bias": np.zeros(hidden),
            "fc.weight": random.standard_normal((classes, hidden)) / hidden**0.5,
            "fc.bias": np.zeros(classes),
        }

    def forward(self, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The hidden layer's outputs and the logits."""
        of = self.parameters
        hidden = np.tanh(inputs @ of["hidden.weight"].T + of["hidden.bias"])
        return hidden, hidden @ of["fc.weight"].T + of["fc.bias"]

    def backward(self, inputs: np.ndarray, hidden: np.ndarray, error: np.ndarray) -> dict[str, np.ndarray]:
        """The gradients, in the parameters' order; `error` is the loss's gradient by the logits."""
        below = (error @ self.parameters["fc.weight"]) * (1 - hidden**2)
        return {
            "hidden.weight": below.T @ inputs,
            "hidden.bias": below.sum(0),
            "fc.weight": error.T @ hidden,
            "fc.bias": error.sum(0),
        }


def cross_entropies(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The cross-entropy of each target."""
    top = logits.max(-1, keepdims=True)
    sums = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    losses: np.ndarray = sums - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return losses


class InTraining(Trainable):
    """A `Network` in training."""

    def __init__(self, network: Network) -> None:
        self.network, self.parameters = network, network.parameters

    def inputs(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        return batch.inputs, batch.targets

    def backward(
        self, inputs: np.ndarray, targets: np.ndarray, scale: Scalar | None
    ) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
        hidden, logits = self.network.forward(inputs)
        self.stamp((trace_events.FORWARD,), [logits])
        losses = cross_entropies(logits, targets)
        error = np.exp(logits - logits.max(-1, keepdims=True))
        error /= error.sum(-1, keepdims=True)
        error[np.arange(len(targets)), targets] -= 1
        factor = (1.0 if scale is None else scale) / len(targets)
        return logits, losses.mean(keepdims=True), self.network.backward(inputs, hidden, error * factor)

    def predict(self, inputs: np.ndarray) -> np.ndarray:
        return self.network.forward(inputs)[1]

    def losses(self, batch: Batch) -> np.ndarray:
        return cross_entropies(self.predict(batch.inputs), batch.targets)


class NumpyAdapter(Adapter):
    """NumPy's arrays, which need few operations of their own."""

    NAME = "numpy"
    CAPABILITIES = frozenset({"fp64"})

    def from_numpy(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def norm(self, tensor: np.ndarray) -> np.ndarray:
        return np.asarray(np.linalg.norm(tensor))

    def where(self, condition: np.ndarray, if_true: np.ndarray, if_false: np.ndarray) -> np.ndarray:
        return np.where(condition, if_true, if_false)

    def concat(self, tensors: Sequence[np.ndarray], axis: int = 0) -> np.ndarray:
        return np.concatenate(tensors, axis)

    def bind(self, model: Network, loss: AnyLoss, precision: str) -> InTraining:
        if not isinstance(loss, Loss) or loss.label_smoothing or precision != "fp64":
            raise RequestError("expected the recipe's loss without label smoothing, in fp64")
        return InTraining(model)
