"""PyTorch behind the seam (`hvdkit/core/adapter.py`)."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import horovod
import horovod.torch as hvd
import numpy as np
import torch

from hvdkit.adapters import declared, pytorch_state, pytorch_update
from hvdkit.adapters import pytorch_tensors as tensors
from hvdkit.adapters.observers import pytorch as observing
from hvdkit.config import Loss, Optimizer
from hvdkit.core import compression as compression_
from hvdkit.core import loop as loop_
from hvdkit.core import marks
from hvdkit.core.adapter import Adapter, Averaging, Gradients, HostWatch, Observer, Op, peeking
from hvdkit.core.compression import Compressor
from hvdkit.core.data import Batch
from hvdkit.core.optimizer import clip
from hvdkit.core.precision import LOSS_SCALING, PRECISIONS, Precision
from hvdkit.core.splits import on_device
from hvdkit.core.state import check_fits
from hvdkit.core.topology import Topology, threads_per_rank, wants_gpu

NAME = "pytorch"
CAPABILITIES = declared.CAPABILITIES[NAME]
CHOSEN = declared.CHOSEN[NAME]

_OPS = {"sum": hvd.Sum, "average": hvd.Average, "min": hvd.Min, "max": hvd.Max}
# A GPU computes while Horovod sends, so there each gradient goes as soon as backward has finished it. On a CPU that
# would only take cores from backward.
_OVERLAPPED_ON = {"cuda"}
_POLL_S, _POLL_SHARE = 1e-4, 1 / 1000
_device = torch.device("cpu")


@dataclass
class Session:
    """The seam's `Session`: a network and what trains it."""

    model: torch.nn.Module
    optimizer: Any
    settings: Optimizer
    criterion: torch.nn.CrossEntropyLoss
    compressor: Compressor
    precision: Precision
    scaler: torch.amp.GradScaler
    overlapped: bool  # gradients are sent while backward goes on, by Horovod's own optimizer
    layout: torch.memory_format  # of images, and so of activations
    forward: Any  # what makes logits in training: the network, or a rival's wrapper
    average: Callable[[Session], None]  # makes the gradients their means over all ranks
    averaging: Averaging | None = None  # what it does so by, where not by Horovod's own reduction
    pools: dict[int, Any] = field(default_factory=dict)  # of images that stay on the device


def versions() -> dict[str, str]:
    return {"framework": torch.__version__, "horovod": horovod.__version__, "numpy": np.__version__}


def init(device: str, threads: int | None = None) -> Topology:
    hvd.init()
    topology = Topology(hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    return placed(topology, device, threads)


def placed(topology: Topology, device: str, threads: int | None) -> Topology:
    """Pin the rank that stands there to its device and threads, as `init` does."""
    global _device
    torch.set_num_threads(threads_per_rank(threads, topology.local_size))
    if wants_gpu(device, torch.cuda.device_count(), topology.local_size, "PyTorch"):
        torch.cuda.set_device(topology.local_rank)
        _device = torch.device("cuda", topology.local_rank)
    return replace(topology, device="gpu" if _device.type == "cuda" else "cpu")


def shutdown() -> None:
    hvd.shutdown()


def watch_hosts() -> HostWatch:
    from hvdkit.adapters.hosts import Watch  # elastic runs alone need it

    return Watch(allgather_object)


def seed(value: int) -> None:
    torch.manual_seed(value)


def synchronize() -> None:
    if _device.type == "cuda":
        torch.cuda.synchronize()
        observing.settle()


def from_numpy(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array, device=_device)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return np.array(tensor.detach().cpu())


def dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return tensor.to(getattr(torch, dtype))


def allreduce(
    tensors: list[torch.Tensor], op: Op = "average", name: str = "allreduce", within: Any = None
) -> list[torch.Tensor]:
    group = within or hvd.global_process_set
    return list(_wait_for_ranks(hvd.grouped_allreduce_async(tensors, name=name, op=_OPS[op], process_set=group)))


def allgather(tensor: torch.Tensor, name: str = "allgather") -> torch.Tensor:
    return _wait_for_ranks(hvd.allgather_async(tensor, name=name))


def broadcast(tensor: torch.Tensor, root_rank: int = 0, name: str = "broadcast", within: Any = None) -> torch.Tensor:
    group = within or hvd.global_process_set
    return _wait_for_ranks(hvd.broadcast_async(tensor, root_rank, name=name, process_set=group))


def alltoall(tensor: torch.Tensor, name: str = "alltoall", splits: list[int] | None = None) -> torch.Tensor:
    lengths = None if splits is None else torch.tensor(splits, dtype=torch.int32)
    return _wait_for_ranks(hvd.alltoall_async(tensor, lengths, name=name))[0]


def process_set(ranks: list[int]) -> Any:
    return hvd.add_process_set(ranks)


def reducescatter(tensor: torch.Tensor, op: Op = "average", name: str = "reducescatter") -> torch.Tensor:
    return _wait_for_ranks(hvd.reducescatter_async(tensor, op=_OPS[op], name=name))


def allgather_object(value: Any, name: str = "allgather_object") -> list[Any]:
    return list(hvd.allgather_object(value, name=name))


def prepare(
    model: torch.nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    compression: str = "none",
    precision: str = "fp32",
    averaging: Averaging | None = None,
) -> Session:
    # With the channels last, as core gives images: a step took 0.83 of the CPU time so in one process with AVX2
    # (docs/benchmarking.md), and tensor cores want it. The weights stay contiguous, as Horovod wants them; activations
    # follow the images.
    overlapped = _device.type in _OVERLAPPED_ON and averaging is None
    session = bound(model, optimizer, loss, compression, precision, overlapped, torch.channels_last)
    if averaging is not None:
        session.averaging, session.average = averaging, _average_otherwise
    return session


def bound(
    model: torch.nn.Module,
    optimizer: Optimizer,
    loss: Loss,
    compression: str,
    precision: str,
    overlapped: bool,
    layout: torch.memory_format = torch.contiguous_format,
) -> Session:
    """As `prepare`; `overlapped` gradients are sent by Horovod's own optimizer while backward goes on."""
    dtypes = PRECISIONS[precision]
    model.to(_device, getattr(torch, dtypes.parameters))
    updater: Any = pytorch_update.make(optimizer, model, tensors)
    compressor = compression_.make(compression, _this())
    if overlapped:
        names = model.named_parameters()
        updater = hvd.DistributedOptimizer(updater, named_parameters=names, compression=compressor, op=hvd.Average)
    scaler = torch.amp.GradScaler(
        _device.type,
        init_scale=LOSS_SCALING.initial,
        growth_factor=LOSS_SCALING.growth,
        backoff_factor=LOSS_SCALING.backoff,
        growth_interval=LOSS_SCALING.interval,
        enabled=dtypes.scales_loss,
    )
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=loss.label_smoothing)
    return Session(
        model, updater, optimizer, criterion, compressor, dtypes, scaler, overlapped, layout, model, _average_gradients
    )


def broadcast_state(session: Session, root_rank: int = 0) -> None:
    # Not hvd.broadcast_optimizer_state: to make the slots it takes a step with zero gradients, and weight decay makes
    # that step move the weights.
    scalars = {name: torch.from_numpy(value) for name, value in pytorch_state.scalars(session).items()}
    hvd.broadcast_parameters(session.model.state_dict() | pytorch_state.slots(session) | scalars, root_rank=root_rank)
    pytorch_state.load_scalars(session, {name: value.numpy() for name, value in scalars.items()})


def train_step(session: Session, batches: Sequence[Batch]) -> torch.Tensor:
    session.optimizer.zero_grad()
    if session.overlapped:
        session.optimizer.set_backward_passes_per_step(len(batches))
    losses = [_backward(session, batch, len(batches))[1] for batch in batches]
    session.average(session)
    update(session)
    _mark(marks.UPDATED)
    return torch.stack(losses).mean()


def update(session: Session) -> None:
    """Take a step by the averaged gradients."""
    session.scaler.unscale_(session.optimizer)
    if session.settings.clip_norm is not None:
        _clip(session.model, session.settings.clip_norm)
    with session.optimizer.skip_synchronize() if session.overlapped else contextlib.nullcontext():
        session.scaler.step(session.optimizer)
    session.scaler.update()


def gradients(session: Session, batch: Batch) -> Gradients:
    session.optimizer.zero_grad()
    if session.overlapped:  # nothing is sent before `own` has been read
        session.optimizer.set_backward_passes_per_step(2)
    logits, loss = _backward(session, batch, 1)
    scale = session.scaler.get_scale()
    own = _gradients(session.model, scale)
    with peeking(session.averaging):
        session.average(session)
    averaged = _gradients(session.model, scale)
    return Gradients(to_numpy(logits), float(loss), own, averaged)


def _backward(session: Session, batch: Batch, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a part's share to the gradients; returns logits and the part's mean loss."""
    session.model.train()
    _mark(marks.BEGIN)
    images, labels = _inputs(session, batch), torch.from_numpy(batch.labels).to(_device)
    _mark(marks.INPUTS)
    with _autocast(session):
        logits = session.forward(images)
    logits = logits.to(getattr(torch, session.precision.parameters))
    loss = session.criterion(logits, labels)
    _mark(marks.FORWARD)
    session.scaler.scale(loss / parts).backward()
    _mark(marks.BACKWARD)
    return logits, loss.detach()


def _average_gradients(session: Session) -> None:
    if session.overlapped:
        _mark(marks.SENT)
        session.optimizer.synchronize()
        _mark(marks.RECEIVED)
        return
    gradients = list(_whole(session.model).values())
    packed = [session.compressor.compress(gradient) for gradient in gradients]
    _mark(marks.SENT)
    handle = hvd.grouped_allreduce_async_([sent for sent, _ in packed], op=hvd.Average, name="gradients")
    _wait_for_ranks(handle)
    _mark(marks.RECEIVED)
    for gradient, (sent, context) in zip(gradients, packed, strict=True):
        if sent is not gradient:
            gradient.copy_(session.compressor.decompress(sent, context))
    _mark(marks.REDUCED)


def _average_otherwise(session: Session) -> None:
    gradients, scaler = _whole(session.model), session.scaler
    assert session.averaging is not None
    means = session.averaging(gradients, scaler.get_scale() if scaler.is_enabled() else None)
    for name, gradient in gradients.items():
        if means[name] is not gradient:
            gradient.copy_(means[name])
    _mark(marks.REDUCED)


def _whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter's gradient by name; zeros where it is unused on this rank, maybe not on the others."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def _wait_for_ranks(handle: int) -> Any:  # the launcher knows a rank that waits by this name (launch/stalls.py)
    """An operation's result. Horovod's own wait never leaves the core, which those threads need that reduce."""
    started = time.perf_counter()
    while not hvd.poll(handle):
        # On a slow network it takes long, and looking takes time from what sends: late by 1/1000 at most.
        time.sleep(max(_POLL_S, _POLL_SHARE * (time.perf_counter() - started)))
    return hvd.synchronize(handle)


def _clip(model: torch.nn.Module, max_norm: float) -> None:
    gradients = [parameter.grad for parameter in model.parameters()]
    for gradient, clipped in zip(gradients, clip(gradients, max_norm, tensors), strict=True):
        gradient.copy_(clipped)


def _gradients(model: torch.nn.Module, scale: float) -> dict[str, np.ndarray]:
    return {
        name: to_numpy(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad) / scale
        for name, parameter in model.named_parameters()
    }


def eval_step(session: Session, images: np.ndarray) -> np.ndarray:
    session.model.eval()
    with torch.inference_mode(), _autocast(session):
        logits = session.model(_images(session, images))
    return to_numpy(logits.to(getattr(torch, session.precision.parameters)))


def set_learning_rate(session: Session, value: float) -> None:
    for group in session.optimizer.param_groups:
        group["lr"] = value


def weights(session: Session) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in session.model.named_parameters()}


def set_weights(session: Session, weights: Mapping[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in session.model.named_parameters():
            parameter.copy_(weights[name])


def state(session: Session) -> dict[str, np.ndarray]:
    tensors = pytorch_state.tensors(session) | pytorch_state.slots(session)
    return {name: to_numpy(tensor) for name, tensor in tensors.items()} | pytorch_state.scalars(session)


def load_state(session: Session, state: dict[str, np.ndarray]) -> None:
    tensors = pytorch_state.tensors(session) | pytorch_state.slots(session)
    check_fits({name: tuple(tensor.shape) for name, tensor in tensors.items()}, state)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in state:
                tensor.copy_(torch.from_numpy(state[name]))
    pytorch_state.load_scalars(session, state)


def fit(session: Session, loop: loop_.Loop) -> None:
    loop_.drive(_this(), session, loop)


def observer(session: Session) -> Observer:
    return observing.Observer(hvd, session.model, _device)


def _mark(name: str) -> None:
    observing.mark(name, _device)


def _this() -> Adapter:
    return sys.modules[__name__]  # a module serves as the Protocol's object


def _autocast(session: Session) -> torch.autocast:
    compute = getattr(torch, session.precision.compute)
    return torch.autocast(_device.type, compute, enabled=session.precision.compute != session.precision.parameters)


def _inputs(session: Session, batch: Batch) -> torch.Tensor:
    def pick(pool: torch.Tensor, indices: np.ndarray) -> torch.Tensor:
        return pool[torch.from_numpy(indices).to(_device)].contiguous(memory_format=session.layout)

    return on_device(batch, session.pools, partial(_images, session), pick)


def _images(session: Session, images: np.ndarray) -> torch.Tensor:
    """NHWC to an NCHW tensor on the device in the session's layout; features of another shape as they are."""
    tensor = torch.from_numpy(np.ascontiguousarray(images))
    if images.ndim == 4:
        tensor = tensor.permute(0, 3, 1, 2).contiguous(memory_format=session.layout)
    tensor = tensor.to(_device)
    return tensor.to(getattr(torch, session.precision.parameters)) if tensor.is_floating_point() else tensor
