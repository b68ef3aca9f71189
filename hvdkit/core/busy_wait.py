"""Threads that wait by turning in circles, and how to keep them from it for a while."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from pathlib import Path

_LOOK_S = 0.05
_SPINS = 0.8  # of the time it wants a core, while the process has nothing to do
_PAUSE, _WAKE = signal.SIGRTMIN + 5, signal.SIGRTMIN + 6


def calm() -> list[int]:
    """Let this process's spinning threads sleep until `wake`; which they are. Call while nothing is done.

    The writer of Horovod 0.28.1's timeline (timeline.cc, WriterLoop) never sleeps, whether it has to write or not: it
    would take a core from a rank, and a profile would tell of nothing else. A lower priority would not do, as it holds
    a lock most of the time. So it gets a signal whose handler is libc's pause.
    """
    libc = _libc()
    if libc is None:
        return []
    before = _wanted()
    time.sleep(_LOOK_S)
    after = _wanted()
    found = [each for each in after if after[each] - before.get(each, after[each]) >= 1e9 * _SPINS * _LOOK_S]
    return [thread for thread in found if libc.tgkill(os.getpid(), thread, _PAUSE) == 0]


def wake(threads: list[int]) -> None:
    """Let threads that `calm` has found go on."""
    libc = _libc()
    for thread in threads:
        if libc is not None:
            libc.tgkill(os.getpid(), thread, _WAKE)


def _libc() -> ctypes.CDLL | None:
    """With both signals set up: one calls `pause`, and the other, a call that does nothing, ends it. None elsewhere."""
    libc = ctypes.CDLL(None)
    try:
        libc.signal.argtypes, libc.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
        libc.signal(_PAUSE, ctypes.cast(libc.pause, ctypes.c_void_p))
        libc.signal(_WAKE, ctypes.cast(libc.getppid, ctypes.c_void_p))
        return libc if libc.tgkill else None
    except AttributeError:  # no glibc of these years
        return None


def _wanted() -> dict[int, int]:
    """Nanoseconds for which each thread but this one was on a core or waited for one."""
    found = {}
    with contextlib.suppress(OSError):
        for folder in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError, ValueError):
                on_core, waited, _ = (int(field) for field in (folder / "schedstat").read_text().split())
                found[int(folder.name)] = on_core + waited
    found.pop(threading.get_native_id(), None)
    return found
