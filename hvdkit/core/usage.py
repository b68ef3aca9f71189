"""What a run uses of its machine, and what others use meanwhile."""

from __future__ import annotations

import contextlib
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_STAT = Path("/proc/stat")
_BOOT = Path("/proc/sys/kernel/random/boot_id")
# Beyond this share of the machine's CPU time used by others, a figure says more about them (docs/benchmarking.md).
NOISY = 0.10
_pinned: list[int] | None = None


@dataclass(frozen=True)
class Snapshot:
    """Seconds of CPU time up to a moment: by this process, and of the whole machine in use and in all."""

    own_s: float
    busy_s: float
    capacity_s: float

    @classmethod
    def take(cls, own_s: float) -> Snapshot:
        """Now. What the hypervisor gives to others counts as in use."""
        try:
            fields = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):  # no such kernel: then nothing is known of others
            return cls(own_s, 0.0, 0.0)
        user, nice, system, idle, iowait, irq, softirq, steal = fields
        busy, tick = user + nice + system + irq + softirq + steal, os.sysconf("SC_CLK_TCK")
        return cls(own_s, busy / tick, (busy + idle + iowait) / tick)

    def since(self, earlier: Snapshot) -> dict[str, float]:
        """The differences, by name."""
        return {
            "own_s": self.own_s - earlier.own_s,
            "busy_s": self.busy_s - earlier.busy_s,
            "capacity_s": self.capacity_s - earlier.capacity_s,
        }


def load_of_others(rows: Sequence[Mapping[str, Any]]) -> float:
    """The share of a machine's CPU time that went to others, 0 to 1.

    `rows` are what `Snapshot.since` gave on each rank of the machine, over about the same time.
    """
    capacity = max((row["capacity_s"] for row in rows), default=0.0)
    if capacity <= 0:
        return 0.0
    others: float = max(row["busy_s"] for row in rows) - sum(row["own_s"] for row in rows)
    return float(min(1.0, max(0.0, others / capacity)))


def machine() -> str:
    """Names the kernel whose CPU time a `Snapshot` tells; hosts that are namespaces of one machine share it."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return platform.node()


def pin_where_asked(local_rank: int, local_size: int, threads: int) -> None:
    """Where the launcher asks (`HVDKIT_PIN`), give this thread and those that it starts from now on `threads` cores.

    Threads that run already stay free: those of communication, which an adapter starts first. Where the machine has too
    few cores for all its ranks, nothing is changed. Asked again, nothing happens.
    """
    global _pinned
    if "HVDKIT_PIN" not in os.environ or _pinned is not None:
        return
    cores = sorted(os.sched_getaffinity(0))
    enough = threads * local_size <= len(cores)
    _pinned = cores[local_rank * threads : (local_rank + 1) * threads] if enough else []
    if _pinned:
        os.sched_setaffinity(0, _pinned)


def pinned() -> list[int] | None:
    """The cores that `pin_where_asked` gave, none where there were too few; None where nobody asked."""
    return _pinned


def started_at() -> float:
    """When the command that started this rank began, in seconds of the wall clock; without a launcher, this process."""
    with contextlib.suppress(ValueError):  # what no launcher of hvdkit's has put there counts for nothing
        told = float(os.environ.get("HVDKIT_STARTED", "nan"))
        if 0 < told <= time.time():
            return told
    return process_began()


def process_began() -> float:
    """When this process was started, in seconds of the wall clock, to a hundredth of one."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + int(stat[19]) / os.sysconf("SC_CLK_TCK")
