"""Where a rank stands among the others."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hvdkit.data.shard import Shard
from hvdkit.errors import RequestError


@dataclass(frozen=True)
class Topology(Shard):
    """Ranks count all processes, local ranks those of a host, cross ranks the hosts of one local rank.

    With data parallelism alone every rank reads a shard of its own. `device` is `cpu` or `gpu`.
    """

    cross_rank: int = 0
    cross_size: int = 1
    device: str = "cpu"

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, the only one that writes."""
        return self.rank == 0


def threads_per_rank(requested: int | None, local_size: int) -> int:
    """CPU threads for a rank: as requested, or as OMP_NUM_THREADS says, or the host's cores shared among its ranks."""
    said = os.environ.get("OMP_NUM_THREADS", "")
    asked = requested or (int(said) if said.isdecimal() else 0)
    return asked or max(1, len(os.sched_getaffinity(0)) // local_size)


def wants_gpu(device: str, found: int, local_size: int, framework: str) -> bool:
    """Whether this host's ranks compute on GPUs, of which the framework sees `found`; one a rank.

    Raises RequestError where `device` is `gpu` or `auto` and there are too few.
    """
    if device == "cpu" or (device == "auto" and not found):
        return False
    if found < local_size:
        raise RequestError(
            f"device: expected a GPU for each of this host's {local_size} rank(s), {framework} sees {found}; "
            "choose device=cpu or fewer ranks a host"
        )
    return True
