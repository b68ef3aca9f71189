"""The adapter for Apache MXNet (Gluon) (`hvdkit/core/seam.py`)."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING

# Before Horovod, which makes MXNet's symbols global: Pillow must find its own libjpeg, not MXNet's.
with contextlib.suppress(ImportError):
    import PIL._imaging  # noqa: F401 - imported to load its library

from hvdkit.adapters.loading import compiled_late, without

with without("sklearn", "scipy.stats"), compiled_late("mxnet"):
    import mxnet as mx

import horovod.mxnet as hvd
from mxnet.gluon.contrib.nn import SyncBatchNorm

from hvdkit.adapters import capabilities
from hvdkit.adapters.collectives import HorovodAdapter
from hvdkit.adapters.mxnet import timing, training
from hvdkit.adapters.mxnet.tensors import MXNetTensors
from hvdkit.core.group import Group, Topology, threads_per_rank, wants_gpu
from hvdkit.core.seam import AnyLoss, Observer, Pending
from hvdkit.core.tensors import Tensor
from hvdkit.core.trainable import Trainable

if TYPE_CHECKING:
    from hvdkit.core.passes import Stage


class MXNet(MXNetTensors, HorovodAdapter):
    """MXNet, with Horovod."""

    NAME = "mxnet"
    CAPABILITIES = capabilities.CAPABILITIES[NAME]
    CHOSEN = capabilities.CHOSEN[NAME]
    batch_norms, layer_parts = "hvdkit.adapters.mxnet.synchronized", "hvdkit.adapters.mxnet.parts"
    counted_cross_entropy = staticmethod(training.counted_cross_entropy)
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

    def bind(self, model: mx.gluon.Block, loss: AnyLoss, precision: str) -> training.TrainableModel:
        synchronized: list[mx.gluon.Block] = []
        model.apply(lambda block: synchronized.append(block) if isinstance(block, SyncBatchNorm) else None)
        self.check_synchronized(block.name for block in synchronized if "by_operator" not in vars(block))
        return training.TrainableModel(model, loss, precision, self.context)

    def start_broadcast(self, tensor: Tensor, group: Group, root_rank: int, name: str) -> Pending:
        from hvdkit.adapters.mxnet.stages import Message  # only stages need it

        return Message(self.broadcast(tensor, group, root_rank, name))

    def stage(self, trainable: Trainable) -> Stage:
        from hvdkit.adapters.mxnet.stages import MXNetStage

        assert isinstance(trainable, training.TrainableModel)
        return MXNetStage(trainable)

    def observer(self, trainable: Trainable) -> Observer:
        return timing.Observer(hvd, list(trainable.parameters))


adapter = MXNet()
