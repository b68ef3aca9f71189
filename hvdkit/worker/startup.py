"""Process settings for scripts that train. Import this module first, before any framework.

Python's garbage collector is disabled until training begins. Frameworks load thousands of modules, and none of their
objects can be freed yet; scanning them takes a sixth of the start-up time (PyTorch 2.13, two cores: 0.35 of 2.2 s).

The C library keeps the memory that a step frees for the next step. By default it returns each block of more than
32 MiB to the kernel, which clears every page again at its next use (docs/benchmarking.md).
"""

import contextlib
import ctypes
import gc
import os

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's <malloc.h>
_KEPT_BYTES = 2**30


def _keep_freed_memory() -> None:
    """Call mallopt(3). Does nothing with another C library, or if the user has set malloc options."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_MAX, 0)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)


_keep_freed_memory()
_disabled_here = gc.isenabled()
gc.disable()


def done() -> None:
    """Enable the garbage collector again once everything is loaded; objects that exist now are not scanned."""
    global _disabled_here
    if _disabled_here:
        _disabled_here = False
        gc.freeze()
        gc.enable()
