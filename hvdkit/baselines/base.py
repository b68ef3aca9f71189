"""What all rivals share: a framework's own adapter in which some functions are replaced."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from safetensors.numpy import load, save

from hvdkit.baselines.rendezvous import Meeting
from hvdkit.core import trainer as loop_
from hvdkit.core.seam import Adapter, Op, Session, Tensor
from hvdkit.core.topology import Topology

_REDUCTIONS: dict[str, Any] = {"sum": np.sum, "average": np.mean, "min": np.min, "max": np.max}


class Rival:
    """The adapter `own`, but for what a subclass replaces. `RIVAL` is the rival's name."""

    RIVAL = ""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["own"], name)

    def fit(self, session: Session, loop: loop_.Loop) -> None:
        """As the seam's; `own` would train by its own functions."""
        loop_.drive(cast(Adapter, self), session, loop)


class Apart(Rival):
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

    def allreduce(self, tensors: list[Tensor], op: Op = "average", name: str = "allreduce") -> list[Tensor]:
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

    def broadcast(self, tensor: Tensor, root_rank: int = 0, name: str = "broadcast") -> Tensor:
        return self.own.from_numpy(self._exchanged({"tensor": self.own.to_numpy(tensor)})[root_rank]["tensor"])

    def allgather_object(self, value: Any, name: str = "allgather_object") -> list[Any]:
        """`value` is what JSON can say, which all that core sends is."""
        return [json.loads(each) for each in self.meeting.exchange(json.dumps(value).encode())]

    def broadcast_state(self, session: Session, root_rank: int = 0) -> None:
        self.own.load_state(session, self._exchanged(self.own.state(session))[root_rank])

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

    def allreduce(self, tensors: list[Tensor], op: Op = "average", name: str = "allreduce") -> list[Tensor]:
        return tensors

    def allgather(self, tensor: Tensor, name: str = "allgather") -> Tensor:
        return tensor

    def broadcast(self, tensor: Tensor, root_rank: int = 0, name: str = "broadcast") -> Tensor:
        return tensor

    def broadcast_state(self, session: Session, root_rank: int = 0) -> None:
        self.meeting.exchange(b"so that all begin at once")


def topology_of_launcher() -> Topology:
    """Where the launcher's environment says that this rank stands; one process without a launcher."""
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
    found = {name: os.environ.get(f"HOROVOD_{name.upper()}") for name in names}
    known: dict[str, Any] = {name: int(value) for name, value in found.items() if value is not None}
    return replace(Topology(), **known)
