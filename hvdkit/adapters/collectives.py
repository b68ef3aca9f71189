"""What all frameworks share whose processes communicate by Horovod: its functions have the same names in each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any

import horovod as package
import numpy as np

from hvdkit.core.group import Group, ProcessSet, Ranks, Topology
from hvdkit.core.seam import Adapter, Op
from hvdkit.core.tensors import Tensor
from hvdkit.errors import RequestError


class HorovodAdapter(Adapter):
    """An adapter over `horovod`, its module for a `framework`."""

    horovod: ModuleType
    framework: ModuleType

    def __init__(self) -> None:
        self._sets: dict[Ranks, ProcessSet] = {}

    def versions(self) -> dict[str, str]:
        framework: str = self.framework.__version__
        return {"framework": framework, "horovod": package.__version__, "numpy": np.__version__}

    def init(self, device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
        hvd = self.horovod
        self._sets = {ranks: hvd.ProcessSet(list(ranks)) for ranks in sets}
        if sets:
            hvd.init(process_sets=list(self._sets.values()))
        else:
            hvd.init()
        world = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()
        return self.bind_device(Topology(*world), device, threads)

    def shutdown(self) -> None:
        self.horovod.shutdown()

    def how(self, group: Group) -> dict[str, Any]:
        """The arguments of each collective over a group."""
        return {"process_set": self.horovod.global_process_set if group.handle is None else group.handle}

    def op(self, op: Op) -> object:
        """Horovod's name of a reduction."""
        return getattr(self.horovod, op.capitalize())

    def allreduce(
        self,
        tensors: list[Tensor],
        group: Group,
        op: Op = "average",
        name: str = "allreduce",
        overwrite: bool = False,
    ) -> list[Tensor]:
        return list(self.horovod.grouped_allreduce(tensors, op=self.op(op), name=name, **self.how(group)))

    def allgather(self, tensor: Tensor, group: Group, name: str = "allgather") -> Tensor:
        return self.horovod.allgather(tensor, name=name, **self.how(group))

    def broadcast(self, tensor: Tensor, group: Group, root_rank: int, name: str = "broadcast") -> Tensor:
        return self.horovod.broadcast(tensor, root_rank, name=name, **self.how(group))

    def alltoall(self, tensor: Tensor, group: Group, name: str = "alltoall", splits: list[int] | None = None) -> Tensor:
        if splits is None:
            return self.horovod.alltoall(tensor, name=name, **self.how(group))
        return self.horovod.alltoall(tensor, self.lengths(splits), name=name, **self.how(group))[0]

    def lengths(self, splits: list[int]) -> Tensor:
        """A tensor of these lengths (int32), for `alltoall`."""
        return self.from_numpy(np.array(splits, np.int32))

    def reducescatter(self, tensor: Tensor, group: Group, op: Op = "average", name: str = "reducescatter") -> Tensor:
        return self.horovod.reducescatter(tensor, op=self.op(op), name=name, **self.how(group))

    def process_set(self, ranks: Ranks) -> ProcessSet:
        return self._sets[ranks] if ranks in self._sets else self.horovod.add_process_set(list(ranks))

    def check_synchronized(self, local: Iterable[str]) -> None:
        """Raise RequestError on several ranks if there is a layer that would be `local`, and is a synchronized batch
        norm by its class."""
        name = next(iter(local), None) if self.horovod.is_initialized() and self.horovod.size() > 1 else None
        if name is not None:
            call = "hvdkit.core.synchronized.synchronize(adapter, model, world_of(topology))"
            raise RequestError(
                f"model: {name} is a synchronized batch norm that would be a local one; call {call} before"
            )
