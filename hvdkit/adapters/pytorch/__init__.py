"""The adapter for PyTorch (`hvdkit/core/seam.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import horovod
import horovod.torch as hvd
import numpy as np
import torch

from hvdkit.adapters import capabilities
from hvdkit.adapters.pytorch import tensors, timing, training
from hvdkit.adapters.pytorch.collectives import TorchCollectives
from hvdkit.adapters.trainable import check_synchronized
from hvdkit.core.group import Ranks, Topology, threads_per_rank, wants_gpu
from hvdkit.core.seam import AnyLoss, Observer, Session
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss

if TYPE_CHECKING:
    from hvdkit.core.synchronized import StatisticsOf

NAME = "pytorch"
CAPABILITIES = capabilities.CAPABILITIES[NAME]
CHOSEN = capabilities.CHOSEN[NAME]

_device = torch.device("cpu")

_collectives = TorchCollectives()
allreduce, allgather, broadcast = _collectives.allreduce, _collectives.allgather, _collectives.broadcast
alltoall, reducescatter = _collectives.alltoall, _collectives.reducescatter
allgather_object, process_set = _collectives.allgather_object, _collectives.process_set

__all__ = ["tensors"]


def versions() -> dict[str, str]:
    return {"framework": torch.__version__, "horovod": horovod.__version__, "numpy": np.__version__}


def init(device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
    return placed(_collectives.start(sets), device, threads)


def device() -> torch.device:
    """This rank's device."""
    return _device


def placed(topology: Topology, device: str, threads: int | None) -> Topology:
    """The part of `init` after Horovod has started: pin the rank to its device and threads."""
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


def random_states() -> dict[str, np.ndarray]:
    """The states of PyTorch's generators, as arrays."""
    states = {"torch": torch.get_rng_state().numpy()}
    return states | ({"torch.cuda": torch.cuda.get_rng_state(_device).numpy()} if _device.type == "cuda" else {})


def load_random_states(states: Mapping[str, np.ndarray]) -> None:
    """Draw on from what `random_states` has returned."""
    if "torch" in states:
        torch.set_rng_state(torch.from_numpy(states["torch"].copy()))
    if "torch.cuda" in states and _device.type == "cuda":
        torch.cuda.set_rng_state(torch.from_numpy(states["torch.cuda"].copy()), _device)


def synchronize() -> None:
    if _device.type == "cuda":
        torch.cuda.synchronize()
        timing.settle()


def from_numpy(array: np.ndarray) -> torch.Tensor:
    return torch.tensor(array, device=_device)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu().resolve_conj().resolve_neg()
    return np.array((tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy())


def dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def cast(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return tensor.to(getattr(torch, dtype))


def synchronize_batch_norms(model: torch.nn.Module, statistics: StatisticsOf, every: bool) -> list[str]:
    from hvdkit.adapters.pytorch import synchronized  # most runs do not need it

    return synchronized.synchronize_batch_norms(model, statistics, every)


def bind(model: torch.nn.Module, loss: AnyLoss, precision: str) -> training.TrainableModel:
    if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        wrapper = type(model).__name__
        raise RequestError(f"model: expected the model itself, got a {wrapper} around it; return its `module`")
    kind, each = torch.nn.SyncBatchNorm, model.named_modules()
    check_synchronized(hvd, (name for name, m in each if isinstance(m, kind) and "statistics" not in vars(m)))
    return training.TrainableModel(model, loss, precision, _device)


def cross_entropy(loss: Loss) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    return partial(training.counted_cross_entropy, loss)


def observer(session: Session) -> Observer:
    assert isinstance(session.trainable, training.TrainableModel)
    return timing.Observer(hvd, session.trainable.model, _device)
