"""What all frameworks share whose processes communicate by Horovod: its functions have the same names in each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import horovod as package
import numpy as np

from hvdkit.adapters import capabilities
from hvdkit.core.group import Group, ProcessSet, Ranks, Topology
from hvdkit.core.seam import Adapter, CountedLoss, Model, Op
from hvdkit.core.tensors import Tensor
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss

if TYPE_CHECKING:
    from hvdkit.results.bus import Carried


class HorovodAdapter(Adapter):
    """An adapter over `horovod`, its module for a `framework`."""

    horovod: ModuleType
    framework: ModuleType
    overwrites = True  # whether Horovod has functions that overwrite their tensors
    on_gpu = False
    counted_cross_entropy: Callable[[Loss, Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    # Modules that most runs do not need: one that synchronizes batch norms, and one for parts of layers.
    batch_norms: str | None = None
    layer_parts: str

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
        topology = self.bind_device(Topology(*world), device, threads)
        self.on_gpu = topology.device == "gpu"
        return replace(topology, shared_memory_ranks=getattr(self._basics, "shared_memory_ranks", int)())

    @property
    def _basics(self) -> object:
        """Has the functions of which some are only in a Horovod that hvdkit has built (runtimes/patches)."""
        return getattr(self.horovod.rank, "__self__", None)

    def communication_counters(self) -> list[Carried] | None:
        from hvdkit.results.bus import Carried  # one rank alone does not ask

        counted = getattr(self._basics, "communication_counters", None)
        return None if counted is None else [Carried(*row) for row in counted()]

    def shutdown(self) -> None:
        self.horovod.shutdown()

    def how(self, group: Group) -> dict[str, Any]:
        """The arguments of each collective over a group."""
        return {"process_set": self.horovod.global_process_set if group.handle is None else group.handle}

    def op(self, op: Op) -> object:
        """Horovod's name of a reduction."""
        return getattr(self.horovod, op.capitalize())

    def call(self, function: str, *arguments: object, group: Group, **named: object) -> Any:
        """The result of one of Horovod's functions. With `_` at its end, it overwrites its tensors."""
        return getattr(self.horovod, function)(*arguments, **named, **self.how(group))

    def allreduce(
        self,
        tensors: list[Tensor],
        group: Group,
        op: Op = "average",
        name: str = "allreduce",
        overwrite: bool = False,
    ) -> list[Tensor]:
        if group.is_alone:
            return super().allreduce(tensors, group, op, name, overwrite)
        end = "_" if overwrite and self.overwrites else ""
        how: dict[str, Any] = {"op": self.op(op), "name": name, "group": group}
        if len(tensors) == 1:  # without the bookkeeping of a group
            return [self.call(f"allreduce{end}", tensors[0], **how)]
        if not (end and self._reduces_as_one(tensors)):
            return list(self.call(f"grouped_allreduce{end}", tensors, **how))
        return self.part(self.call("allreduce_", self.join(tensors), **how), [tensor.shape for tensor in tensors])

    def _reduces_as_one(self, tensors: list[Tensor]) -> bool:
        """Whether tensors are joined first: over sockets Horovod copies a group's into its buffer and back, and of one
        that is made of them no copy comes back."""
        joins = self.NAME in capabilities.REDUCES_AS_ONE and not self.on_gpu
        return joins and len({self.dtype(tensor) for tensor in tensors}) == 1

    def allgather(self, tensor: Tensor, group: Group, name: str = "allgather") -> Tensor:
        if group.is_alone:
            return super().allgather(tensor, group, name)
        return self.call("allgather", tensor, group=group, name=name)

    def broadcast(self, tensor: Tensor, group: Group, root_rank: int, name: str = "broadcast") -> Tensor:
        if group.is_alone:
            return super().broadcast(tensor, group, root_rank, name)
        return self.call("broadcast", tensor, root_rank, group=group, name=name)

    def alltoall(self, tensor: Tensor, group: Group, name: str = "alltoall", splits: list[int] | None = None) -> Tensor:
        if group.is_alone:
            return super().alltoall(tensor, group, name, splits)
        received = self.call("alltoall", tensor, splits, group=group, name=name)
        return received[0] if isinstance(received, tuple | list) else received  # without the lengths

    def reducescatter(self, tensor: Tensor, group: Group, op: Op = "average", name: str = "reducescatter") -> Tensor:
        if group.is_alone:
            return super().reducescatter(tensor, group, op, name)
        return self.call("reducescatter", tensor, group=group, op=self.op(op), name=name)

    def process_set(self, ranks: Ranks) -> ProcessSet:
        return self._sets[ranks] if ranks in self._sets else self.horovod.add_process_set(list(ranks))

    def enter_parts(self, tensor: Tensor, group: Group, name: str) -> Tensor:
        return import_module(self.layer_parts).use(self, tensor, group, name, forward=False)

    def leave_parts(self, tensor: Tensor, group: Group, name: str) -> Tensor:
        return import_module(self.layer_parts).use(self, tensor, group, name, forward=True)

    def cross_entropy(self, loss: Loss) -> CountedLoss:
        counted = self.counted_cross_entropy
        return super().cross_entropy(loss) if counted is None else partial(counted, loss)

    def synchronize_batch_norms(self, model: Model, group: Group, every: bool = True) -> list[str]:
        if self.batch_norms is None:
            return super().synchronize_batch_norms(model, group, every)
        from hvdkit.adapters.batch_statistics import BatchStatistics

        def statistics(layer: str) -> BatchStatistics | None:
            return BatchStatistics(self, group, layer) if group.size > 1 else None

        own = import_module(self.batch_norms)
        layers: list[str] = own.synchronize_batch_norms(model, statistics, every and group.size > 1)
        return layers

    def check_synchronized(self, local: Iterable[str]) -> None:
        """Raise RequestError on several ranks if there is a layer that would be `local`, and is a synchronized batch
        norm by its class."""
        name = next(iter(local), None) if self.horovod.is_initialized() and self.horovod.size() > 1 else None
        if name is not None:
            call = "adapter.synchronize_batch_norms(model, world_of(topology))"
            raise RequestError(
                f"model: {name} is a synchronized batch norm that would be a local one; call {call} before"
            )
