"""A baseline over torch.distributed: Gloo, or NCCL on GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from hvdkit.baselines import base
from hvdkit.baselines.pytorch.sessions import ByHand
from hvdkit.core.group import Ranks, Topology

_TIMEOUT = timedelta(days=1)  # the launcher detects ranks that hang


class ProcessGroup(base.WithoutHorovod, ByHand):
    """Starts PyTorch's default process group of all ranks. A subclass averages gradients over it."""

    def init(self, device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
        topology = super().init(device, threads, sets)
        store = self._store(topology)
        backend = "nccl" if topology.device == "gpu" else "gloo"
        dist.init_process_group(backend, store=store, rank=topology.rank, world_size=topology.size, timeout=_TIMEOUT)
        return topology

    def _store(self, topology: Topology) -> dist.TCPStore:
        """PyTorch's key-value store, on a port that the kernel chooses."""
        host, size = "127.0.0.1", topology.size
        if topology.is_root:
            store = dist.TCPStore(host, 0, size, is_master=True, wait_for_workers=False)
            self.rendezvous.exchange(str(store.port).encode())
            return store
        return dist.TCPStore(host, int(self.rendezvous.exchange(b"")[0]), size, is_master=False)

    def shutdown(self) -> None:
        super().shutdown()
        dist.destroy_process_group()
