"""The adapter for Apache MXNet (Gluon) (`hvdkit/core/seam.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

# Before Horovod, which makes MXNet's symbols global: Pillow must find its own libjpeg, not MXNet's.
with contextlib.suppress(ImportError):
    import PIL._imaging  # noqa: F401 - imported to load its library

from hvdkit.adapters.loading import without

with without("sklearn", "scipy.stats"):
    import mxnet as mx

import horovod
import horovod.mxnet as hvd
import numpy as np
from mxnet.gluon.contrib.nn import SyncBatchNorm

from hvdkit.adapters import capabilities
from hvdkit.adapters.collectives import Collectives
from hvdkit.adapters.mxnet import tensors, timing, training
from hvdkit.adapters.mxnet.tensors import join, part
from hvdkit.adapters.trainable import check_synchronized
from hvdkit.core.group import Group, Ranks, Topology, threads_per_rank, wants_gpu
from hvdkit.core.seam import AnyLoss, Observer, Op, Session
from hvdkit.recipe.schema import Loss

if TYPE_CHECKING:
    from hvdkit.core.synchronized import StatisticsOf

NAME = "mxnet"
CAPABILITIES = capabilities.CAPABILITIES[NAME]
CHOSEN = capabilities.CHOSEN[NAME]

_context = mx.cpu()


class _Collectives(Collectives):
    def allreduce(
        self,
        tensors: list[mx.nd.NDArray],
        group: Group,
        op: Op = "average",
        name: str = "allreduce",
        overwrite: bool = False,
    ) -> list[mx.nd.NDArray]:
        if not overwrite:
            return super().allreduce(tensors, group, op, name)
        settings = {"op": self._ops[op], "name": name, "process_set": self.set_of(group)}
        if not _worth_joining(tensors):
            hvd.grouped_allreduce_(tensors, **settings)
            return tensors
        joined = join(tensors)
        hvd.allreduce_(joined, **settings)
        return part(joined, [tensor.shape for tensor in tensors])


def _worth_joining(tensors: list[mx.nd.NDArray]) -> bool:
    """Whether to reduce tensors as one, if they are large: Horovod copies a group into its buffer, and back."""
    size = sum(tensor.size for tensor in tensors) * np.dtype(tensors[0].dtype).itemsize
    alike = len({tensor.dtype for tensor in tensors}) == 1 and _context.device_type == "cpu"
    return alike and size >= capabilities.REDUCES_AS_ONE[NAME] * len(tensors)


_collectives = _Collectives(hvd, lambda array: mx.nd.array(array, dtype=array.dtype), lambda tensor: tensor.asnumpy())
allreduce, allgather, broadcast = _collectives.allreduce, _collectives.allgather, _collectives.broadcast
alltoall, reducescatter = _collectives.alltoall, _collectives.reducescatter
allgather_object, process_set = _collectives.allgather_object, _collectives.process_set

__all__ = ["tensors"]


def versions() -> dict[str, str]:
    return {"framework": mx.__version__, "horovod": horovod.__version__, "numpy": np.__version__}


def init(device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
    return placed(_collectives.start(sets), device, threads)


def placed(topology: Topology, device: str, threads: int | None) -> Topology:
    """The part of `init` after Horovod has started: pin the rank to its device and threads."""
    global _context
    mx.base.check_call(mx.base._LIB.MXSetNumOMPThreads(threads_per_rank(threads, topology.local_size)))
    if wants_gpu(device, mx.context.num_gpus(), topology.local_size, "MXNet"):
        _context = mx.gpu(topology.local_rank)
    return replace(topology, device=_context.device_type)


def shutdown() -> None:
    mx.nd.waitall()  # the engine may still execute a collective
    hvd.shutdown()


def seed(value: int) -> None:
    mx.random.seed(value)


def synchronize() -> None:
    mx.nd.waitall()


def from_numpy(array: np.ndarray) -> mx.nd.NDArray:
    return mx.nd.array(array, ctx=_context, dtype=array.dtype)


def to_numpy(tensor: mx.nd.NDArray) -> np.ndarray:
    return np.asarray(tensor.asnumpy())


def dtype(tensor: mx.nd.NDArray) -> str:
    return str(np.dtype(tensor.dtype).name)


def cast(tensor: mx.nd.NDArray, dtype: str) -> mx.nd.NDArray:
    return tensor.astype(dtype)


def synchronize_batch_norms(model: mx.gluon.Block, statistics: StatisticsOf, every: bool) -> list[str]:
    from hvdkit.adapters.mxnet import synchronized  # most runs do not need it

    return synchronized.synchronize_batch_norms(model, statistics, every)


def bind(model: mx.gluon.Block, loss: AnyLoss, precision: str) -> training.TrainableModel:
    found: list[mx.gluon.Block] = []
    model.apply(lambda block: found.append(block) if isinstance(block, SyncBatchNorm) else None)
    check_synchronized(hvd, (block.name for block in found if "by_operator" not in vars(block)))
    return training.TrainableModel(model, loss, precision, _context)


def cross_entropy(loss: Loss) -> Callable[[mx.nd.NDArray, mx.nd.NDArray], tuple[mx.nd.NDArray, mx.nd.NDArray]]:
    return partial(training.counted_cross_entropy, loss)


def observer(session: Session) -> Observer:
    return timing.Observer(hvd, list(session.trainable.parameters))
