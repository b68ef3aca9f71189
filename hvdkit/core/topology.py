"""A rank's place among all ranks: rank, world size, local and cross rank, and device."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hvdkit.data import Shard
from hvdkit.errors import RequestError


@dataclass(frozen=True)
class Topology(Shard):
    """Ranks number all processes, local ranks those of one host, cross ranks the hosts with the same local rank.

    `device` is `cpu` or `gpu`. Without a `mesh.Mesh`, each rank reads a shard of its own.
    """

    cross_rank: int = 0
    cross_size: int = 1
    device: str = "cpu"

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, the only one that writes."""
        return self.rank == 0


def threads_per_rank(requested: int | None, local_size: int) -> int:
    """CPU threads for a rank: `requested`, else OMP_NUM_THREADS, else the host's cores divided among its ranks."""
    from_environment = os.environ.get("OMP_NUM_THREADS", "")
    given = requested or (int(from_environment) if from_environment.isdecimal() else 0)
    return given or max(1, len(os.sched_getaffinity(0)) // local_size)


def wants_gpu(device: str, found: int, local_size: int, framework: str) -> bool:
    """Whether this host's ranks compute on GPUs, one per rank, if the framework finds `found` of them.

    Raises RequestError if there are too few for `gpu`, or some but too few for `auto`.
    """
    if device == "cpu" or (device == "auto" and not found):
        return False
    if found < local_size:
        raise RequestError(
            f"device: expected a GPU for each of this host's {local_size} rank(s), {framework} sees {found}; "
            "choose device=cpu or fewer ranks a host"
        )
    return True
