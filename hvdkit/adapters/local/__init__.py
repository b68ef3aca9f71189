"""An adapter without a framework (`hvdkit/core/seam.py`): NumPy, one process, no Horovod.

Core's tests run on it in milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdkit.adapters import capabilities
from hvdkit.adapters.local import tensors
from hvdkit.adapters.trainable import TrainableModel as EagerModel
from hvdkit.core import trace_events
from hvdkit.core.group import Group, Ranks, Topology
from hvdkit.core.seam import AnyLoss, Observer, Op, Session
from hvdkit.data.dataset import Batch
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss
from hvdkit.tasks.image_classification import cross_entropy as cross_entropies

if TYPE_CHECKING:
    from hvdkit.core.synchronized import StatisticsOf

__all__ = ["tensors"]

NAME = "local"
CAPABILITIES = capabilities.CAPABILITIES[NAME]
CHOSEN = capabilities.CHOSEN[NAME]


class Linear:
    """Softmax regression on the pixels, in float64: the smallest model that can be trained."""

    def __init__(self, features: int, classes: int) -> None:
        self.parameters = {"fc.weight": np.zeros((classes, features)), "fc.bias": np.zeros(classes)}

    def __call__(self, inputs: np.ndarray) -> np.ndarray:
        """(n, height, width, channels) -> logits (n, classes)."""
        return inputs.reshape(len(inputs), -1) @ self.parameters["fc.weight"].T + self.parameters["fc.bias"]

    def gradients(self, inputs: np.ndarray, error: np.ndarray) -> dict[str, np.ndarray]:
        """Gradients by parameter; `error` (n, classes) is d loss / d logits."""
        return {"fc.weight": error.T @ inputs.reshape(len(inputs), -1), "fc.bias": error.sum(axis=0)}


def versions() -> dict[str, str]:
    return {"framework": np.__version__, "numpy": np.__version__}


def init(device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
    if device == "gpu":
        raise RequestError("device: expected cpu or auto, as the local adapter knows no GPU; got gpu")
    return Topology()


def shutdown() -> None:
    pass


def seed(value: int) -> None:
    pass  # nothing here draws random numbers


def synchronize() -> None:
    pass


def from_numpy(array: np.ndarray) -> np.ndarray:
    return np.array(array)


def to_numpy(tensor: np.ndarray) -> np.ndarray:
    return np.array(tensor)


def dtype(tensor: np.ndarray) -> str:
    return tensor.dtype.name


def cast(tensor: np.ndarray, dtype: str) -> np.ndarray:
    return tensor.astype(dtype)


def allreduce(
    tensors: list[np.ndarray], group: Group, op: Op = "average", name: str = "allreduce", overwrite: bool = False
) -> list[np.ndarray]:
    return [tensor.copy() for tensor in tensors]


def allgather(tensor: np.ndarray, group: Group, name: str = "allgather") -> np.ndarray:
    return tensor.copy()


def broadcast(tensor: np.ndarray, group: Group, root_rank: int, name: str = "broadcast") -> np.ndarray:
    return tensor.copy()


def alltoall(tensor: np.ndarray, group: Group, name: str = "alltoall", splits: list[int] | None = None) -> np.ndarray:
    return tensor.copy()


def process_set(ranks: Ranks) -> Any:
    return ranks


def reducescatter(tensor: np.ndarray, group: Group, op: Op = "average", name: str = "reducescatter") -> np.ndarray:
    return tensor.copy()


def allgather_object(value: Any, group: Group, name: str = "allgather_object") -> list[Any]:
    return [value]


def cross_entropy(loss: Loss) -> Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    raise RequestError(
        "loss: expected no ignored_label or class_weights, as the local adapter differentiates no functions"
    )


def synchronize_batch_norms(model: Linear, statistics: StatisticsOf, every: bool) -> list[str]:
    return []


def bind(model: Linear, loss: AnyLoss, precision: str) -> TrainableModel:
    return TrainableModel(model, loss)


class TrainableModel(EagerModel):
    """A `Linear` model in training."""

    def __init__(self, model: Linear, loss: AnyLoss) -> None:
        if not isinstance(loss, Loss):
            raise RequestError("loss: expected a recipe's loss, as the local adapter differentiates no functions")
        self.model, self._smoothing = model, loss.label_smoothing
        self.parameters = model.parameters
        self.buffers: dict[str, np.ndarray] = {}
        self.stamp = _stamp

    def inputs(self, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        return batch.inputs, batch.targets

    def backward(
        self, inputs: np.ndarray, targets: np.ndarray, scale: float | None
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


def _stamp(names: tuple[str, ...], tensors: list[np.ndarray]) -> list[np.ndarray]:
    for name in names:
        trace_events.mark(name)
    return tensors


def observer(session: Session) -> Observer:
    return Observer()
