"""Where a rank stands among the others."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """Ranks count all processes, local ranks those of a host, cross ranks the hosts of one local rank.

    `device` is `cpu` or `gpu`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    device: str = "cpu"

    @property
    def is_root(self) -> bool:
        """Whether this is rank 0, the only one that writes."""
        return self.rank == 0


def threads_per_rank(requested: int | None, local_size: int) -> int:
    """CPU threads for a rank: as requested, or this process's cores shared evenly among the host's ranks."""
    return requested or max(1, len(os.sched_getaffinity(0)) // local_size)
