"""The null adapter (`hvdkit/core/seam.py`): NumPy, one process, no Horovod.

Core's tests run on it in milliseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.adapters import capabilities, timing
from hvdkit.adapters.local import tensors
from hvdkit.core import trace_events
from hvdkit.core import trainer as loop_
from hvdkit.core.metrics import cross_entropy
from hvdkit.core.seam import Adapter, Averaging, Gradients, HostWatch, Observer, Op, peeking
from hvdkit.core.state import check_fits, slot_name
from hvdkit.core.topology import Topology
from hvdkit.core.update_rules import bias_corrections, clip, counts_steps, slot_names, update
from hvdkit.data.batches import Batch
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss, Optimizer
from hvdkit.strategies.codecs import cast as compression_
from hvdkit.strategies.codecs.cast import Compressor

NAME = "local"
CAPABILITIES = capabilities.CAPABILITIES[NAME]
CHOSEN = capabilities.CHOSEN[NAME]


class Linear:
    """Softmax regression on the pixels, in float64: the smallest network that can be trained."""

    def __init__(self, features: int, classes: int) -> None:
        self.parameters = {"fc.weight": np.zeros((classes, features)), "fc.bias": np.zeros(classes)}

    def __call__(self, images: np.ndarray) -> np.ndarray:
        """(n, height, width, channels) -> logits (n, classes)."""
        return images.reshape(len(images), -1) @ self.parameters["fc.weight"].T + self.parameters["fc.bias"]

    def gradients(self, images: np.ndarray, error: np.ndarray) -> dict[str, np.ndarray]:
        """By parameter, from d loss / d logits (n, classes)."""
        return {"fc.weight": error.T @ images.reshape(len(images), -1), "fc.bias": error.sum(axis=0)}


@dataclass
class Session:
    """The seam's `Session`: a network and what trains it."""

    model: Linear
    optimizer: Optimizer
    loss: Loss
    compressor: Compressor
    averaging: Averaging | None
    learning_rate: float
    slots: dict[str, tuple[np.ndarray, ...]]  # by parameter
    steps: int = 0


def versions() -> dict[str, str]:
    return {"framework": np.__version__, "numpy": np.__version__}


def init(device: str, threads: int | None = None) -> Topology:
    if device == "gpu":
        raise RequestError("device: expected cpu or auto, as the local adapter knows no GPU; got gpu")
    return Topology()


def shutdown() -> None:
    pass


def watch_hosts() -> HostWatch:
    raise RequestError("elastic: expected a framework with Horovod, got one process without")


def seed(value: int) -> None:
    pass  # nothing here draws random numbers of its own


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
    tensors: list[np.ndarray], op: Op = "average", name: str = "allreduce", within: Any = None
) -> list[np.ndarray]:
    return [tensor.copy() for tensor in tensors]


def allgather(tensor: np.ndarray, name: str = "allgather") -> np.ndarray:
    return tensor.copy()


def broadcast(tensor: np.ndarray, root_rank: int = 0, name: str = "broadcast", within: Any = None) -> np.ndarray:
    return tensor.copy()


def alltoall(tensor: np.ndarray, name: str = "alltoall", splits: list[int] | None = None) -> np.ndarray:
    return tensor.copy()


def process_set(ranks: list[int]) -> Any:
    return tuple(ranks)


def reducescatter(tensor: np.ndarray, op: Op = "average", name: str = "reducescatter") -> np.ndarray:
    return tensor.copy()


def allgather_object(value: Any, name: str = "allgather_object") -> list[Any]:
    return [value]


def prepare(
    model: Linear,
    optimizer: Optimizer,
    loss: Loss,
    compression: str = "none",
    precision: str = "fp32",
    averaging: Averaging | None = None,
) -> Session:
    count = len(slot_names(optimizer))
    slots = {name: (np.zeros_like(value),) * count for name, value in model.parameters.items()}
    compressor = compression_.make(compression, _this())
    return Session(model, optimizer, loss, compressor, averaging, optimizer.learning_rate, slots)


def broadcast_state(session: Session, root_rank: int = 0) -> None:
    pass


def train_step(session: Session, batches: Sequence[Batch]) -> np.ndarray:
    found = [_backward(session, batch) for batch in batches]
    optimizer, parameters = session.optimizer, session.model.parameters
    own = {name: np.sum([each[2][name] for each in found], axis=0) / len(found) for name in parameters}
    averaged = _average(session, own)
    means = [averaged[name] for name in parameters]
    if optimizer.clip_norm is not None:
        means = clip(means, optimizer.clip_norm, tensors)
    session.steps += 1
    corrections = bias_corrections(optimizer, session.steps)
    for name, gradient in zip(parameters, means, strict=True):
        parameters[name], session.slots[name] = update(
            optimizer, tensors, parameters[name], gradient, session.slots[name], session.learning_rate, corrections
        )
    trace_events.mark(trace_events.UPDATED)
    return np.asarray(np.mean([loss for _, loss, _ in found]))


def gradients(session: Session, batch: Batch) -> Gradients:
    logits, loss, own = _backward(session, batch)
    with peeking(session.averaging):
        return Gradients(logits, loss, own, dict(_average(session, own)))


def _average(session: Session, own: dict[str, np.ndarray]) -> Mapping[str, np.ndarray]:
    if session.averaging is not None:
        return session.averaging(own)
    names, packed = list(own), [session.compressor.compress(value) for value in own.values()]
    sent = _this().allreduce([tensor for tensor, _ in packed], name="gradients")
    means = zip(names, sent, packed, strict=True)
    return {name: session.compressor.decompress(mean, context) for name, mean, (_, context) in means}


def _backward(session: Session, batch: Batch) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """Logits, mean loss and the rank's own gradients."""
    trace_events.mark(trace_events.BEGIN)
    trace_events.mark(trace_events.INPUTS)
    logits, count = session.model(batch.images), len(batch.labels)
    classes = logits.shape[1]
    shares = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    smoothing = session.loss.label_smoothing
    target = np.eye(classes)[batch.labels] * (1 - smoothing) + smoothing / classes
    trace_events.mark(trace_events.FORWARD)
    own = session.model.gradients(batch.images, (shares - target) / count)
    for name in own:
        trace_events.mark(trace_events.READY + name)
    trace_events.mark(trace_events.BACKWARD)
    every = [cross_entropy(logits, np.full(count, label)) for label in range(classes)]
    loss = (1 - smoothing) * cross_entropy(logits, batch.labels).mean() + smoothing * np.mean(every)
    return logits, float(loss), own


def eval_step(session: Session, images: np.ndarray) -> np.ndarray:
    return session.model(images)


def set_learning_rate(session: Session, value: float) -> None:
    session.learning_rate = value


def weights(session: Session) -> np.ndarray:
    return tensors.join([value for _, value in sorted(session.model.parameters.items())])


def set_weights(session: Session, weights: np.ndarray) -> None:
    parameters = session.model.parameters
    names = sorted(parameters)
    for name, value in zip(names, tensors.part(weights, [parameters[name].shape for name in names]), strict=True):
        parameters[name] = value.copy()


def state(session: Session) -> dict[str, np.ndarray]:
    values = {name: value.copy() for name, value in session.model.parameters.items()}
    for name, slots in session.slots.items():
        for slot, value in zip(slot_names(session.optimizer), slots, strict=True):
            values[slot_name(slot, name)] = value.copy()
    if counts_steps(session.optimizer):
        values["optimizer.step"] = np.asarray(session.steps)
    return values


def load_state(session: Session, state: dict[str, np.ndarray]) -> None:
    parameters = session.model.parameters.items()
    slots = {slot_name(slot, name): value.shape for name, value in parameters for slot in slot_names(session.optimizer)}
    check_fits({name: value.shape for name, value in parameters} | slots, state)
    for name in session.model.parameters:
        session.model.parameters[name] = state[name].astype(np.float64)
        names = [slot_name(slot, name) for slot in slot_names(session.optimizer)]
        if names[0] in state:
            session.slots[name] = tuple(state[each].copy() for each in names)
    session.steps = int(state.get("optimizer.step", session.steps))


def fit(session: Session, loop: loop_.Loop) -> None:
    loop_.drive(_this(), session, loop)


def observer(session: Session) -> Observer:
    return timing.Observer()


def _this() -> Adapter:
    return sys.modules[__name__]  # a module serves as the Protocol's object
