"""The machine that a command ran on, as `compare.json`, `parity.json` and `bench.json` have it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from hvdkit.results.json_files import Figures


class Machine(Figures):
    """A machine. `cores` counts those that the process may use."""

    processor: str
    cores: int
    memory_mib: int
    system: str
    python: str


def this_machine() -> Machine:
    """This machine, from /proc."""
    return Machine(
        processor=_proc_field("/proc/cpuinfo", "model name") or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_mib=int((_proc_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) // 1024,
        system=platform.platform(),
        python=platform.python_version(),
    )


def _proc_field(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), None)
