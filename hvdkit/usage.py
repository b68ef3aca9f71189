"""CPU time that a run uses on its machine, and that other processes use in the same time; CPU pinning."""

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
# If others use more than this share of the machine's CPU time, measurements are marked noisy (docs/benchmarking.md).
NOISY = 0.10
_pinned: list[int] | None = None


@dataclass(frozen=True)
class Snapshot:
    """CPU seconds up to a point in time: of this process, and of the machine, busy and in total."""

    own_s: float
    busy_s: float
    capacity_s: float

    @classmethod
    def take(cls, own_s: float) -> Snapshot:
        """Take a snapshot now. Time that the hypervisor steals counts as busy."""
        try:
            fields = [int(field) for field in _STAT.read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):  # no such file on this kernel: the use by others is unknown
            return cls(own_s, 0.0, 0.0)
        user, nice, system, idle, iowait, irq, softirq, steal = fields
        busy, tick = user + nice + system + irq + softirq + steal, os.sysconf("SC_CLK_TCK")
        return cls(own_s, busy / tick, (busy + idle + iowait) / tick)

    def since(self, earlier: Snapshot) -> dict[str, float]:
        """The differences to an earlier snapshot, in seconds by name."""
        return {
            "own_s": self.own_s - earlier.own_s,
            "busy_s": self.busy_s - earlier.busy_s,
            "capacity_s": self.capacity_s - earlier.capacity_s,
        }


def load_of_others(rows: Sequence[Mapping[str, Any]]) -> float:
    """The share of a machine's CPU time that other processes used, 0 to 1.

    `rows` are the results of `Snapshot.since` on each rank of the machine, over about the same period.
    """
    capacity = max((row["capacity_s"] for row in rows), default=0.0)
    if capacity <= 0:
        return 0.0
    others: float = max(row["busy_s"] for row in rows) - sum(row["own_s"] for row in rows)
    return float(min(1.0, max(0.0, others / capacity)))


def machine() -> str:
    """An identifier of the kernel whose CPU time a `Snapshot` reads; containers on one machine share it."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return platform.node()


def pin_where_asked(local_rank: int, local_size: int, threads: int) -> None:
    """If the launcher sets `HVDKIT_PIN`, pin this thread and the threads that it starts later to `threads` cores.

    Threads that already run, such as the communication threads that an adapter starts first, are not pinned. If the
    machine has too few cores for all its ranks, nothing changes. A second call does nothing.
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
    """The cores that `pin_where_asked` pinned to: empty if there were too few, None if pinning was not requested."""
    return _pinned


def started_at() -> float:
    """When the command that started this rank began, in `time.time` seconds; without a launcher, this process."""
    with contextlib.suppress(ValueError):  # a value that hvdkit's launcher did not set is ignored
        began = float(os.environ.get("HVDKIT_STARTED", "nan"))
        if 0 < began <= time.time():
            return began
    return process_began()


def process_began() -> float:
    """When this process started, in `time.time` seconds, to a hundredth of a second."""
    stat = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + int(stat[19]) / os.sysconf("SC_CLK_TCK")
