"""What memory a process has, and what it may have."""

from __future__ import annotations

import re
import resource
from pathlib import Path
from typing import NamedTuple

from hvdkit.runtimes import machine

_FILLED = 0.95  # of the memory; the rest is for what allocators lose


class MemoryUse(NamedTuple):
    """Bytes: resident, of address space, and of a GPU; 0 where there is none."""

    resident: int
    space: int
    device: int = 0


def limits(ranks: int, index: int, gpu: bool) -> MemoryUse:
    """What each of so many ranks of this host may have: of its memory, of address space, and of its GPU."""
    whole = machine.memory()
    spare = field(Path("/proc/meminfo"), "MemAvailable")
    share = min(whole // ranks, spare // ranks + now().resident) if spare else whole // ranks
    space, _ = resource.getrlimit(resource.RLIMIT_AS)
    devices = machine.gpu_memory() if gpu else []
    device = devices[index % len(devices)] if devices else 0
    space = 2**62 if space == resource.RLIM_INFINITY else space
    return MemoryUse(*(round(_FILLED * value) for value in (share, space, device)))


def field(path: Path, name: str) -> int:
    """Bytes of a line of a file of the kernel's, which counts kB; 0 without one."""
    try:
        match = re.search(rf"^{name}:\s*(\d+) kB", path.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 1024 * int(match[1]) if match else 0


def now() -> MemoryUse:
    """What this process has of main memory and of address space."""
    status = Path("/proc/self/status")
    return MemoryUse(field(status, "VmRSS"), field(status, "VmSize"))
