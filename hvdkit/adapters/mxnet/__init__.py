"""The adapter for Apache MXNet (Gluon) (`hvdkit/core/seam.py`)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

# Before Horovod, which makes MXNet's symbols global: Pillow must find its own libjpeg, not MXNet's.
with contextlib.suppress(ImportError):
    import PIL._imaging  # noqa: F401 - imported to load its library

from hvdkit.adapters.loading import without

with without("sklearn", "scipy.stats"):
    import mxnet as mx

import horovod.mxnet as hvd
import numpy as np
from mxnet.gluon.contrib.nn import SyncBatchNorm

from hvdkit.adapters import capabilities
from hvdkit.adapters.collectives import HorovodAdapter
from hvdkit.adapters.mxnet import timing, training
from hvdkit.adapters.mxnet.tensors import MXNetTensors
from hvdkit.core.group import Group, Topology, threads_per_rank, wants_gpu
from hvdkit.core.seam import AnyLoss, CountedLoss, Observer, Op
from hvdkit.core.trainable import Trainable
from hvdkit.recipe.schema import Loss

if TYPE_CHECKING:
    from hvdkit.core.batch_statistics import StatisticsOf


class MXNet(MXNetTensors, HorovodAdapter):
    """MXNet, with Horovod."""

    NAME = "mxnet"
    CAPABILITIES = capabilities.CAPABILITIES[NAME]
    CHOSEN = capabilities.CHOSEN[NAME]
    horovod, framework = hvd, mx

    def bind_device(self, topology: Topology, device: str, threads: int | None) -> Topology:
        mx.base.check_call(mx.base._LIB.MXSetNumOMPThreads(threads_per_rank(threads, topology.local_size)))
        if wants_gpu(device, mx.context.num_gpus(), topology.local_size, "MXNet"):
            self.context = mx.gpu(topology.local_rank)
        return replace(topology, device=self.context.device_type)

    def shutdown(self) -> None:
        mx.nd.waitall()  # the engine may still execute a collective
        super().shutdown()

    def synchronize(self) -> None:
        mx.nd.waitall()

    def seed(self, value: int) -> None:
        mx.random.seed(value)

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
        if not self._worth_joining(tensors):
            hvd.grouped_allreduce_(tensors, op=self.op(op), name=name, **self.how(group))
            return tensors
        joined = self.join(tensors)
        hvd.allreduce_(joined, op=self.op(op), name=name, **self.how(group))
        return self.part(joined, [tensor.shape for tensor in tensors])

    def _worth_joining(self, tensors: list[mx.nd.NDArray]) -> bool:
        """Whether to reduce tensors as one, if they are large: Horovod copies a group into its buffer, and back."""
        size = sum(tensor.size for tensor in tensors) * np.dtype(tensors[0].dtype).itemsize
        alike = len({tensor.dtype for tensor in tensors}) == 1 and self.context.device_type == "cpu"
        return alike and size >= capabilities.REDUCES_AS_ONE[self.NAME] * len(tensors)

    def lengths(self, splits: list[int]) -> mx.nd.NDArray:
        return mx.nd.array(splits, dtype="int32")  # in main memory

    def bind(self, model: mx.gluon.Block, loss: AnyLoss, precision: str) -> training.TrainableModel:
        synchronized: list[mx.gluon.Block] = []
        model.apply(lambda block: synchronized.append(block) if isinstance(block, SyncBatchNorm) else None)
        self.check_synchronized(block.name for block in synchronized if "by_operator" not in vars(block))
        return training.TrainableModel(model, loss, precision, self.context)

    def cross_entropy(self, loss: Loss) -> CountedLoss:
        return partial(training.counted_cross_entropy, loss)

    def synchronize_batch_norms(self, model: mx.gluon.Block, statistics: StatisticsOf, every: bool) -> list[str]:
        from hvdkit.adapters.mxnet import synchronized  # most runs do not need it

        return synchronized.synchronize_batch_norms(model, statistics, every)

    def observer(self, trainable: Trainable) -> Observer:
        return timing.Observer(hvd, list(trainable.parameters))


adapter = MXNet()
