"""Imported before anything else by a script that trains: settings of the process that frameworks start under.

Python's garbage collector waits until training begins. Frameworks load thousands of modules, of which nothing can be
freed yet; looking through them again and again takes a sixth of their start (PyTorch 2.13, two cores: 0.35 of 2.2 s).

The C library keeps the memory that a step frees, for the next step. By default it returns each block of more than
32 MiB to the kernel, which clears every page again at its next use (docs/benchmarking.md).
"""

import contextlib
import ctypes
import gc
import os

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's <malloc.h>
_KEPT_BYTES = 2**30


def _keep_freed_memory() -> None:
    """As mallopt(3) does; another C library, or a user who has chosen settings of their own, is left alone."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


_keep_freed_memory()
_waits = gc.isenabled()
gc.disable()


def done() -> None:
    """Everything is loaded: the collector works again, and leaves alone what is there by now."""
    global _waits
    if _waits:
        _waits = False
        gc.freeze()
        gc.enable()
