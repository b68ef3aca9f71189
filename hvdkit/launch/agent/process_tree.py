"""The processes below one, and what they leave. Standard library only: see rank_agent.py."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

_SHARED = "/dev/shm"


def stat(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat after pid and name: state, parent … `pid` may be PID/task/ID, a thread.

    Raises OSError or ValueError.
    """
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text[text.rindex(")") + 1 :].split()  # the name may hold anything


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes the kernel's out-of-memory killer has ended so far; None where that cannot be read.

    They are those of this process's control group, or else of the machine. `root` has `proc` and `sys`.
    """
    places = []
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "memory":
                places.append(f"sys/fs/cgroup/memory{path}/memory.oom_control")
            elif not controllers:
                places.append(f"sys/fs/cgroup{path}/memory.events")
    for place in (*places, "proc/vmstat"):
        with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
            lines = (root / place).read_text().splitlines()
            return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return None


def descendants(pid: int) -> list[int]:
    """Every process below `pid` that has not ended, in any order."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError):
                state, parent, *_ = stat(int(entry.name))
                if state not in "ZX":  # an ended process has no children any more
                    children.setdefault(int(parent), []).append(int(entry.name))
    pids: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        todo += below
        pids += below
    return pids


def kill(pids: list[int], spare_trackers: bool = False) -> None:
    """Send SIGKILL to the processes that are still there, except, if asked, resource trackers of multiprocessing.

    One of those ends by itself once the processes that it serves are gone, and removes their semaphores and shared
    memory, which would stay in /dev/shm for ever.
    """
    for pid in pids:
        with contextlib.suppress(OSError):
            if spare_trackers and b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                continue
            os.kill(pid, signal.SIGKILL)


def remove_segments(pids: set[int]) -> None:
    """Remove what processes that have ended have left in shared memory: samples of MXNet's and PyTorch's loaders."""
    with contextlib.suppress(OSError):
        for path in Path(_SHARED).iterdir():
            kind, number, *_ = (*path.name.split("_"), "")
            base = {"mx": 16, "torch": 10}.get(kind)
            with contextlib.suppress(OSError, ValueError):
                if base and int(number, base) in pids and not Path(f"/proc/{int(number, base)}").exists():
                    path.unlink()
