"""PyTorch behind the seam (`hvdkit/core/adapter.py`)."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import horovod
import horovod.torch as hvd
import numpy as np
import torch

from hvdkit.config import Loss, Optimizer
from hvdkit.core import compression as compression_
from hvdkit.core import loop as loop_
from hvdkit.core.adapter import Adapter, Op
from hvdkit.core.compression import Compressor
from hvdkit.core.data import Batch
from hvdkit.core.optimizer import decay_of
from hvdkit.core.state import check_fits, slot_name
from hvdkit.core.topology import Topology, threads_per_rank
from hvdkit.errors import RequestError

NAME = "pytorch"
CAPABILITIES = frozenset({"gpu", "float16", "float32", "float64", "int32", "int64", "scalars", "empty"})

_OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max}
_device = torch.device("cpu")


@dataclass
class Session:
    model: torch.nn.Module
    optimizer: Any
    criterion: torch.nn.CrossEntropyLoss
    compressor: Compressor | None  # None where the optimizer averages the gradients itself


def versions() -> dict[str, str]:
    return {"framework": torch.__version__, "horovod": horovod.__version__, "numpy": np.__version__}


def init(device: str, threads: int | None = None) -> Topology:
    global _device
    hvd.init()
    torch.set_num_threads(threads_per_rank(threads, hvd.local_size()))
    gpu = torch.cuda.is_available()
    if device == "gpu" and not gpu:
        raise RequestError("device: expected a GPU that PyTorch can see, found none; choose device=cpu")
    if gpu and device != "cpu":
        torch.cuda.set_device(hvd.local_rank())
        _device = torch.device("cuda", hvd.local_rank())
    return Topology(
        hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size(),
        "gpu" if _device.type == "cuda" else "cpu",
    )  # fmt: skip


def shutdown() -> None:
    hvd.shutdown()


def seed(value: int) -> None:
    torch.manual_seed(value)


def synchronize() -> None:
    if _device.type == "cuda":
        torch.cuda.synchronize()


def from_numpy(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array, device=_device)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return np.array(tensor.detach().cpu())


def dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return tensor.to(getattr(torch, dtype))


def allreduce(tensors: list[torch.Tensor], op: Op = "average", name: str = "allreduce") -> list[torch.Tensor]:
    return list(hvd.grouped_allreduce(tensors, name=name, op=_OPS[op]))


def allgather(tensor: torch.Tensor, name: str = "allgather") -> torch.Tensor:
    return hvd.allgather(tensor, name=name)


def broadcast(tensor: torch.Tensor, root_rank: int = 0, name: str = "broadcast") -> torch.Tensor:
    return hvd.broadcast(tensor, root_rank, name=name)


def allgather_object(value: Any, name: str = "allgather_object") -> list[Any]:
    return list(hvd.allgather_object(value, name=name))


def prepare(model: torch.nn.Module, optimizer: Optimizer, loss: Loss, compression: str) -> Session:
    model.to(_device)
    groups: dict[float, list[torch.nn.Parameter]] = {}
    for parameter in model.parameters():
        groups.setdefault(decay_of(optimizer, tuple(parameter.shape)), []).append(parameter)
    sgd = torch.optim.SGD(
        [{"params": parameters, "weight_decay": decay} for decay, parameters in groups.items()],
        lr=optimizer.learning_rate,
        momentum=optimizer.momentum,
        nesterov=optimizer.nesterov,
    )
    compressor = compression_.make(compression, _this())
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=loss.label_smoothing)
    if _device.type == "cpu":
        return Session(model, sgd, criterion, compressor)
    # A GPU computes while Horovod sends, so each gradient goes as soon as backward has finished it.
    names = model.named_parameters()
    distributed = hvd.DistributedOptimizer(sgd, named_parameters=names, compression=compressor, op=hvd.Average)
    return Session(model, distributed, criterion, None)


def broadcast_state(session: Session, root_rank: int = 0) -> None:
    # Not hvd.broadcast_optimizer_state: to make the slots it takes a step with zero gradients, and weight decay makes
    # that step move the weights.
    velocities = {slot_name("momentum", name): velocity for name, velocity in _velocities(session).items()}
    hvd.broadcast_parameters(session.model.state_dict() | velocities, root_rank=root_rank)


def train_step(session: Session, batch: Batch) -> torch.Tensor:
    session.model.train()
    session.optimizer.zero_grad()
    logits = session.model(_images(batch.images))
    loss = session.criterion(logits, torch.from_numpy(batch.labels).to(_device))
    loss.backward()
    if session.compressor:
        _average_gradients(session.model, session.compressor)
    session.optimizer.step()
    return loss.detach()


def _average_gradients(model: torch.nn.Module, compressor: Compressor) -> None:
    """All at once: on a CPU sending would only take cores from backward, and one group is negotiated once."""
    gradients = []
    for parameter in model.parameters():
        if parameter.grad is None:  # unused on this rank, maybe not on the others
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    packed = [compressor.compress(gradient) for gradient in gradients]
    hvd.grouped_allreduce_([sent for sent, _ in packed], op=hvd.Average, name="gradients")
    for gradient, (sent, context) in zip(gradients, packed, strict=True):
        if sent is not gradient:
            gradient.copy_(compressor.decompress(sent, context))


def eval_step(session: Session, images: np.ndarray) -> np.ndarray:
    session.model.eval()
    with torch.inference_mode():
        return to_numpy(session.model(_images(images)))


def set_learning_rate(session: Session, value: float) -> None:
    for group in session.optimizer.param_groups:
        group["lr"] = value


def state(session: Session) -> dict[str, np.ndarray]:
    values = {name: to_numpy(tensor) for name, tensor in _tensors(session).items()}
    return values | {slot_name("momentum", name): to_numpy(slot) for name, slot in _velocities(session).items()}


def load_state(session: Session, state: dict[str, np.ndarray]) -> None:
    tensors = _tensors(session)
    check_fits({name: tuple(tensor.shape) for name, tensor in tensors.items()}, state)
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(state[name]))
        for name, velocity in _velocities(session).items():
            if slot_name("momentum", name) in state:
                velocity.copy_(torch.from_numpy(state[slot_name("momentum", name)]))


def fit(session: Session, loop: loop_.Loop) -> None:
    loop_.drive(_this(), session, loop)


def _this() -> Adapter:
    return sys.modules[__name__]  # a module serves as the Protocol's object


def _tensors(session: Session) -> dict[str, torch.Tensor]:
    """Parameters and buffers; PyTorch alone counts a batch norm's batches, and nothing reads that here."""
    named = session.model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in named.items() if not name.endswith("num_batches_tracked")}


def _velocities(session: Session) -> dict[str, torch.Tensor]:
    """By parameter. PyTorch makes them at the first step; a zero one made here leads to the same step."""
    velocities = {}
    for name, parameter in session.model.named_parameters():
        slots = session.optimizer.state[parameter]
        if slots.get("momentum_buffer") is None:
            slots["momentum_buffer"] = torch.zeros_like(parameter)
        velocities[name] = slots["momentum_buffer"]
    return velocities


def _images(images: np.ndarray) -> torch.Tensor:
    """NHWC to a contiguous NCHW tensor on the device; features of another shape as they are."""
    if images.ndim == 4:
        images = images.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(images)).to(_device)
