"""PyTorch's rivals: Horovod by hand, DistributedDataParallel, and no communication at all."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvdkit.adapters import pytorch as own
from hvdkit.adapters.pytorch import Session, reduction
from hvdkit.baselines import base
from hvdkit.baselines.base import Apart, Rival
from hvdkit.core.seam import Gradients
from hvdkit.core.topology import Topology
from hvdkit.data.batches import Batch
from hvdkit.recipe.schema import Loss, Optimizer

_TIMEOUT = timedelta(days=1)  # a rank that hangs is the launcher's affair


class Plain(Rival):
    """hvd.DistributedOptimizer around torch.optim: each gradient is sent as soon as backward has finished it."""

    RIVAL = "plain"

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        compression: str = "none",
        precision: str = "fp32",
    ) -> Session:
        return own.bound(model, optimizer, loss, compression, precision, overlapped=True)


class Ddp(Apart):
    """DistributedDataParallel in its default settings over Gloo, NCCL on GPUs.

    But for `broadcast_buffers`: as in the recipe, each rank keeps running statistics of its own, and no time is spent
    on sending them each step.
    """

    RIVAL = "ddp"

    def init(self, device: str, threads: int | None = None) -> Topology:
        topology = super().init(device, threads)
        store = self._store(topology)
        backend = "nccl" if topology.device == "gpu" else "gloo"
        dist.init_process_group(backend, store=store, rank=topology.rank, world_size=topology.size, timeout=_TIMEOUT)
        return topology

    def _store(self, topology: Topology) -> dist.TCPStore:
        """Torch's own rendezvous, on a port that the kernel chooses."""
        host, size = "127.0.0.1", topology.size
        if topology.is_root:
            store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
            self.meeting.exchange(str(store.port).encode())
            return store
        return dist.TCPStore(host, int(self.meeting.exchange(b"")[0]), size, is_master=False)

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        compression: str = "none",
        precision: str = "fp32",
    ) -> Session:
        session = own.bound(model, optimizer, loss, compression, precision, overlapped=False)
        session.forward = DistributedDataParallel(model, broadcast_buffers=False)
        session.average = lambda _: None  # backward has done it
        return session

    def train_step(self, session: Session, batches: Sequence[Batch]) -> torch.Tensor:
        session.optimizer.zero_grad()
        *first, last = batches
        with session.forward.no_sync():
            losses = [own._backward(session, batch, len(batches))[1] for batch in first]
        losses.append(own._backward(session, last, len(batches))[1])
        own.update(session)
        return torch.stack(losses).mean()

    def gradients(self, session: Session, batch: Batch) -> Gradients:
        """The rank's own gradients of one backward pass without a reduction, the averaged ones of a second with it."""
        session.optimizer.zero_grad()
        statistics = [buffer.clone() for buffer in session.model.buffers()]
        with session.forward.no_sync():
            logits, loss = own._backward(session, batch, 1)
        scale = session.scaler.get_scale()
        mine = reduction.arrays(session.model, scale)
        with torch.no_grad():  # the second pass must not count again
            for buffer, before in zip(session.model.buffers(), statistics, strict=True):
                buffer.copy_(before)
        session.optimizer.zero_grad()
        own._backward(session, batch, 1)
        return Gradients(own.to_numpy(logits), float(loss), mine, reduction.arrays(session.model, scale))

    def shutdown(self) -> None:
        super().shutdown()
        dist.destroy_process_group()


class Independent(base.Independent):
    """Gradients stay where they are."""

    def prepare(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        loss: Loss,
        compression: str = "none",
        precision: str = "fp32",
    ) -> Session:
        session = own.bound(model, optimizer, loss, compression, precision, overlapped=False)
        session.average = lambda _: None
        return session


RIVALS = {"plain": Plain, "ddp": Ddp, "independent": Independent}
