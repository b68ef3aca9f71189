"""What all baselines share: a framework's own adapter in which some functions are replaced."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from safetensors.numpy import load, save

from hvdkit.baselines.rendezvous import Meeting
from hvdkit.core.seam import Op, Tensor
from hvdkit.core.session import Session
from hvdkit.core.strategy import Strategy
from hvdkit.core.topology import Topology
from hvdkit.recipe.schema import Recipe

_REDUCTIONS: dict[str, Any] = {"sum": np.sum, "average": np.mean, "min": np.min, "max": np.max}


class Baseline:
    """The adapter `own`, but for what a subclass replaces. `RIVAL` is its name on the command line.

    What it does instead of hvdkit's step is in its `strategy`, or in a `session_class` of its own.
    """

    RIVAL = ""
    session_class: type[Session] = Session

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["own"], name)

    def strategy(self, topology: Topology, recipe: Recipe) -> Strategy:
        """How its ranks come to one model."""
        return Strategy()


class Half(Strategy):
    """Tells a baseline's session whether its gradients go in float16."""

    def __init__(self, half: bool) -> None:
        self.half = half


class Apart(Baseline):
    """A rival without Horovod. How gradients are averaged is a subclass's; all else, which is rare, goes by a Meeting.

    The launcher's Horovod variables say who the ranks are. All ranks are on one machine.
    """

    def __init__(self, own: Any) -> None:
        super().__init__(own)
        self.meeting: Meeting

    def versions(self) -> dict[str, str]:
        return {name: version for name, version in self.own.versions().items() if name != "horovod"}

    def init(self, device: str, threads: int | None = None) -> Topology:
        topology = topology_of_launcher()
        self.meeting = Meeting(topology.rank, topology.size)
        self.connect(topology)
        return cast(Topology, self.own.placed(topology, device, threads))

    def connect(self, topology: Topology) -> None:
        """Make ready what averages gradients; the framework has computed nothing yet."""

    def shutdown(self) -> None:
        self.meeting.exchange(b"leaving")
        self.meeting.close()

    def allreduce(
        self,
        tensors: list[Tensor],
        op: Op = "average",
        name: str = "allreduce",
        within: Any = None,
        overwrite: bool = False,
    ) -> list[Tensor]:
        mine = {str(index): self.own.to_numpy(tensor) for index, tensor in enumerate(tensors)}
        everyone = self._exchanged(mine)
        return [
            self.own.from_numpy(
                np.asarray(_REDUCTIONS[op]([each[index] for each in everyone], axis=0), mine[index].dtype)
            )
            for index in mine
        ]

    def allgather(self, tensor: Tensor, name: str = "allgather") -> Tensor:
        everyone = self._exchanged({"tensor": self.own.to_numpy(tensor)})
        return self.own.from_numpy(np.concatenate([each["tensor"] for each in everyone]))

    def broadcast(self, tensor: Tensor, root_rank: int = 0, name: str = "broadcast", within: Any = None) -> Tensor:
        return self.own.from_numpy(self._exchanged({"tensor": self.own.to_numpy(tensor)})[root_rank]["tensor"])

    def allgather_object(self, value: Any, name: str = "allgather_object") -> list[Any]:
        """`value` is what JSON can say, which all that core sends is."""
        return [json.loads(each) for each in self.meeting.exchange(json.dumps(value).encode())]

    def _exchanged(self, arrays: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        # not ascontiguousarray, which gives an array without dimensions one
        packed = save({name: np.asarray(array, order="C") for name, array in arrays.items()})
        return [load(each) for each in self.meeting.exchange(packed)]


@dataclass(frozen=True)
class Alone(Topology):
    """One of several processes that train each for itself; `number` counts them."""

    number: int = 0

    @property
    def is_root(self) -> bool:
        return self.number == 0


class Independent(Apart):
    """As many processes at once, each of size 1. They meet before the first step and after the last one only."""

    RIVAL = "independent"

    def init(self, device: str, threads: int | None = None) -> Topology:
        placed = super().init(device, threads)
        return Alone(0, 1, placed.local_rank, placed.local_size, 0, 1, placed.device, placed.rank)

    def allreduce(
        self,
        tensors: list[Tensor],
        op: Op = "average",
        name: str = "allreduce",
        within: Any = None,
        overwrite: bool = False,
    ) -> list[Tensor]:
        return tensors

    def allgather(self, tensor: Tensor, name: str = "allgather") -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, root_rank: int = 0, name: str = "broadcast", within: Any = None) -> Tensor:
        self.meeting.exchange(b"so that all begin at once")
        return tensor


def topology_of_launcher() -> Topology:
    """Where the launcher's environment says that this rank stands; one process without a launcher."""
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    found = {name: os.environ.get(f"HOROVOD_{name.upper()}") for name in names}
    known: dict[str, Any] = {name: int(value) for name, value in found.items() if value is not None}
    return replace(Topology(), **known)
