"""The base classes of all baselines: each is a subclass of a framework's adapter that replaces some functions."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdkit.baselines.registry import RIVALS
from hvdkit.baselines.rendezvous import Rendezvous
from hvdkit.core.group import Group, Mesh, Ranks, Topology
from hvdkit.core.seam import Adapter, Op
from hvdkit.core.session import Session
from hvdkit.core.strategy import Strategy
from hvdkit.core.tensors import Tensor
from hvdkit.recipe.schema import Recipe

_REDUCTIONS: dict[str, Any] = {"sum": np.sum, "average": np.mean, "min": np.min, "max": np.max}


class Baseline(Adapter):
    """Comes before the framework's adapter in the bases of a class.

    A baseline replaces hvdkit's training step by its `strategy`, or by its own `session_class`.
    """

    session_class: type[Session] = Session

    def named(self, rival: str) -> Baseline:
        """This baseline, by its name on the command line."""
        self.rival, self.counts = rival, RIVALS[rival].counts
        return self

    def strategy(self, mesh: Mesh, recipe: Recipe) -> Strategy:
        """How this baseline averages gradients. By default it does not."""
        return Strategy()


class WithoutHorovod(Baseline):
    """A baseline without Horovod. A subclass averages gradients; the rarer collectives use a `Rendezvous`.

    Ranks are read from the launcher's Horovod variables. All ranks are on one machine, and the only group is the world.
    """

    rendezvous: Rendezvous

    def versions(self) -> dict[str, str]:
        return {name: version for name, version in super().versions().items() if name != "horovod"}

    def init(self, device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
        topology = topology_of_launcher()
        self.rendezvous = Rendezvous(topology.rank, topology.size)
        self.connect(topology)
        return self.bind_device(topology, device, threads)

    def connect(self, topology: Topology) -> None:
        """Set up the averaging of gradients. Called before the framework computes anything."""

    def shutdown(self) -> None:
        self.rendezvous.exchange(b"leaving")
        self.rendezvous.close()

    def allreduce(
        self,
        tensors: list[Tensor],
        group: Group,
        op: Op = "average",
        name: str = "allreduce",
        overwrite: bool = False,
    ) -> list[Tensor]:
        everyone = self._exchanged([self.to_numpy(tensor) for tensor in tensors])
        return [
            self.from_numpy(np.asarray(_REDUCTIONS[op](arrays, axis=0), arrays[0].dtype))
            for arrays in zip(*everyone, strict=True)
        ]

    def allgather(self, tensor: Tensor, group: Group, name: str = "allgather") -> Tensor:
        return self.from_numpy(np.concatenate([arrays[0] for arrays in self._exchanged([self.to_numpy(tensor)])]))

    def broadcast(self, tensor: Tensor, group: Group, root_rank: int, name: str = "broadcast") -> Tensor:
        return self.from_numpy(self._exchanged([self.to_numpy(tensor)])[root_rank][0])

    def allgather_object(self, value: Any, group: Group, name: str = "allgather_object") -> list[Any]:
        return [pickle.loads(content) for content in self.rendezvous.exchange(pickle.dumps(value))]

    def _exchanged(self, arrays: list[np.ndarray]) -> list[list[np.ndarray]]:
        """The arrays of all ranks."""
        return [pickle.loads(content) for content in self.rendezvous.exchange(pickle.dumps(arrays, protocol=5))]


@dataclass(frozen=True)
class IndependentTopology(Topology):
    """The topology of one of several independent processes; `number` is its index."""

    number: int = 0

    @property
    def is_root(self) -> bool:
        return self.number == 0


class Independent(WithoutHorovod):
    """Independent processes, each of size 1, which synchronize only before the first and after the last step."""

    def init(self, device: str, threads: int | None = None, sets: Sequence[Ranks] = ()) -> Topology:
        placed = super().init(device, threads, sets)
        alone = {"rank": 0, "size": 1, "cross_rank": 0, "cross_size": 1, "number": placed.rank}
        return IndependentTopology(**(vars(placed) | alone))

    def broadcast(self, tensor: Tensor, group: Group, root_rank: int, name: str = "broadcast") -> Tensor:
        self.rendezvous.exchange(b"so that all begin at once")
        return tensor

    def _exchanged(self, arrays: list[np.ndarray]) -> list[list[np.ndarray]]:
        return [arrays]


def topology_of_launcher() -> Topology:
    """This rank's topology from the launcher's environment variables; a single process without a launcher."""
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    texts = {name: os.environ.get(f"HOROVOD_{name.upper()}") for name in names}
    known: dict[str, Any] = {name: int(value) for name, value in texts.items() if value is not None}
    return replace(Topology(), **known)
