"""PyTorch behind the seam (`hvdkit/core/seam.py`)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import horovod
import horovod.torch as hvd
import numpy as np
import torch

from hvdkit.adapters import capabilities
from hvdkit.adapters.pytorch import reduction, tensors
from hvdkit.adapters.pytorch import state as pytorch_state
from hvdkit.adapters.pytorch import timing as observing
from hvdkit.adapters.pytorch import update as pytorch_update
from hvdkit.adapters.pytorch.collectives import WaitingCollectives
from hvdkit.core import trace_events
from hvdkit.core import trainer as loop_
from hvdkit.core.precision import LOSS_SCALING, PRECISIONS, Precision
from hvdkit.core.seam import Adapter, Averaging, Gradients, Observer, peeking
from hvdkit.core.topology import Topology, threads_per_rank, wants_gpu
from hvdkit.data.batches import Batch
from hvdkit.data.dataset import on_device
from hvdkit.recipe.schema import Loss, Optimizer
from hvdkit.strategies.codecs import cast as compression_
from hvdkit.strategies.codecs.cast import Compressor

NAME = "pytorch"
CAPABILITIES = capabilities.CAPABILITIES[NAME]
CHOSEN = capabilities.CHOSEN[NAME]

# A GPU computes while Horovod sends, so there each gradient goes as soon as backward has finished it. On a CPU that
# would only take cores from backward.
_OVERLAPPED_ON = {"cuda"}
_device = torch.device("cpu")

# Those of the seam's functions that are written in files of their own.
_collectives = WaitingCollectives()
allreduce, allgather, broadcast = _collectives.allreduce, _collectives.allgather, _collectives.broadcast
alltoall, reducescatter = _collectives.alltoall, _collectives.reducescatter
allgather_object, process_set = _collectives.allgather_object, _collectives.process_set
watch_hosts = _collectives.watch_hosts
broadcast_state, state, load_state = pytorch_state.broadcast_state, pytorch_state.state, pytorch_state.load_state
weights, set_weights = pytorch_state.weights, pytorch_state.set_weights


@dataclass
class Session:
    """The seam's `Session`: a network and what trains it."""

    model: torch.nn.Module
    device: torch.device
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
    return placed(_collectives.start(), device, threads)


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
        session.averaging, session.average = averaging, reduction.average_otherwise
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
    average = reduction.average
    return Session(
        model, _device, updater, optimizer, criterion, compressor, dtypes, scaler, overlapped, layout, model, average
    )


def train_step(session: Session, batches: Sequence[Batch]) -> torch.Tensor:
    session.optimizer.zero_grad()
    if session.overlapped:
        session.optimizer.set_backward_passes_per_step(len(batches))
    losses = [_backward(session, batch, len(batches))[1] for batch in batches]
    session.average(session)
    update(session)
    observing.mark(trace_events.UPDATED, session.device)
    return torch.stack(losses).mean()


def update(session: Session) -> None:
    """Take a step by the averaged gradients."""
    session.scaler.unscale_(session.optimizer)
    if session.settings.clip_norm is not None:
        reduction.clip_in_place(session.model, session.settings.clip_norm)
    with session.optimizer.skip_synchronize() if session.overlapped else contextlib.nullcontext():
        session.scaler.step(session.optimizer)
    session.scaler.update()


def gradients(session: Session, batch: Batch) -> Gradients:
    session.optimizer.zero_grad()
    if session.overlapped:  # nothing is sent before `own` has been read
        session.optimizer.set_backward_passes_per_step(2)
    logits, loss = _backward(session, batch, 1)
    scale = session.scaler.get_scale()
    own = reduction.arrays(session.model, scale)
    with peeking(session.averaging):
        session.average(session)
    averaged = reduction.arrays(session.model, scale)
    return Gradients(to_numpy(logits), float(loss), own, averaged)


def _backward(session: Session, batch: Batch, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a part's share to the gradients; returns logits and the part's mean loss."""
    session.model.train()
    observing.mark(trace_events.BEGIN, session.device)
    images, labels = _inputs(session, batch), torch.from_numpy(batch.labels).to(session.device)
    observing.mark(trace_events.INPUTS, session.device)
    with _autocast(session):
        logits = session.forward(images)
    logits = logits.to(getattr(torch, session.precision.parameters))
    loss = session.criterion(logits, labels)
    observing.mark(trace_events.FORWARD, session.device)
    session.scaler.scale(loss / parts).backward()
    observing.mark(trace_events.BACKWARD, session.device)
    return logits, loss.detach()


def eval_step(session: Session, images: np.ndarray) -> np.ndarray:
    session.model.eval()
    with torch.inference_mode(), _autocast(session):
        logits = session.model(_images(session, images))
    return to_numpy(logits.to(getattr(torch, session.precision.parameters)))


def set_learning_rate(session: Session, value: float) -> None:
    for group in session.optimizer.param_groups:
        group["lr"] = value


def fit(session: Session, loop: loop_.Loop) -> None:
    loop_.drive(_this(), session, loop)


def observer(session: Session) -> Observer:
    return observing.Observer(hvd, session.model, session.device)


def _this() -> Adapter:
    return sys.modules[__name__]  # a module serves as the Protocol's object


def _autocast(session: Session) -> torch.autocast:
    compute = getattr(torch, session.precision.compute)
    mixed = session.precision.compute != session.precision.parameters
    return torch.autocast(session.device.type, compute, enabled=mixed)


def _inputs(session: Session, batch: Batch) -> torch.Tensor:
    def pick(pool: torch.Tensor, indices: np.ndarray) -> torch.Tensor:
        return pool[torch.from_numpy(indices).to(session.device)].contiguous(memory_format=session.layout)

    return on_device(batch, session.pools, partial(_images, session), pick)


def _images(session: Session, images: np.ndarray) -> torch.Tensor:
    """NHWC to an NCHW tensor on the device in the session's layout; features of another shape as they are."""
    tensor = torch.from_numpy(np.ascontiguousarray(images))
    if images.ndim == 4:
        tensor = tensor.permute(0, 3, 1, 2).contiguous(memory_format=session.layout)
    tensor = tensor.to(session.device)
    return tensor.to(getattr(torch, session.precision.parameters)) if tensor.is_floating_point() else tensor
