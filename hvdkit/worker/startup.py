"""Process settings for scripts that train: `begin` is called first, before a framework is imported.

Python's garbage collector is disabled until training begins. Frameworks load thousands of modules, and none of their
objects can be freed yet; scanning them takes a sixth of the start-up time (PyTorch 2.13, two cores: 0.35 of 2.2 s).

A script that its user starts with an interpreter that lacks a package ends with a line that names one that has it.

Python's and NumPy's generators of random numbers are seeded, so that what a script draws at its top is the same on all
ranks (`seed_alike`).

The C library keeps the memory that a step frees for the next step. By default it returns each block of more than
32 MiB to the kernel, which clears every page again at its next use (benchmarks/notes.md). What is in memory from the
start to the end has pages of its own (`own_pages`).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # of glibc's <malloc.h>
_KEPT_BYTES = 2**30
_LARGE_BYTES, _MOST_BLOCKS = 2**18, 2**16
_collects = False  # whether `done` enables the garbage collector
_seeded: tuple[Any, Any] | None = None  # the states of Python's and NumPy's generators after `begin`
_left: tuple[Any, Any] | None = None  # their states when hvdkit starts, after what the script has at its top


def _set(*options: tuple[int, int]) -> None:
    """Call mallopt(3). Does nothing with another C library, or if the user has set malloc options."""
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        for option, value in options:
            library.mallopt(option, value)


@contextlib.contextmanager
def own_pages(then_from: int | None = None) -> Iterator[None]:
    """A context in which large blocks get pages of their own: for what is in memory as long as the process.

    Blocks that steps free are then not between them, so that the C library can join them, and a step needs less.
    Afterwards blocks get pages of their own if they have `then_from` bytes (at most 32 MiB), or none does.
    """
    _set((_MMAP_THRESHOLD, _LARGE_BYTES), (_MMAP_MAX, _MOST_BLOCKS))
    try:
        yield
    finally:
        _set((_MMAP_MAX, 0) if then_from is None else (_MMAP_THRESHOLD, then_from))


def return_freed_memory() -> None:
    """Call malloc_trim(3). What the start, or a step, has freed is in other places than what comes next needs."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _say_what_lacks(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """An exception hook: a line and status 2 for a failed import. All else is printed as always."""
    if not isinstance(error, ImportError):
        sys.__excepthook__(kind, error, trace)
        return
    script, remedy = Path(sys.argv[0]), "look with `hvdkit doctor`"
    with contextlib.suppress(ImportError):  # what lacks here may be what hvdkit needs
        from hvdkit.runtimes.pins import FRAMEWORKS

        name = FRAMEWORKS.get(script.absolute().parent.name, "")
        remedy = f"`hvdkit runtime build {name}` makes one that has all"
        from hvdkit.runtimes.store import python_of

        if name and python_of(name) != Path(sys.executable).absolute():
            remedy = f"start it with {python_of(name)}, which `hvdkit runtime build {name}` makes"
    reason = " ".join(str(error).split())
    print(f"error: {script}: {reason} in the interpreter {sys.executable}; {remedy}", file=sys.stderr, flush=True)
    os._exit(2)


def begin() -> None:
    """Make the settings of this process; a second call does nothing."""
    global _collects, _seeded
    if _seeded is not None:
        return
    _collects = gc.isenabled()
    gc.disable()
    _set((_MMAP_MAX, 0), (_TRIM_THRESHOLD, _KEPT_BYTES))
    if "HVDKIT_RANK_DIR" not in os.environ:  # hvdkit's command line reads what Python prints
        sys.excepthook = _say_what_lacks
    import numpy as np  # its absence is a line

    random.seed(0)
    np.random.seed(0)
    _seeded = random.getstate(), np.random.get_state()


def seed_alike(seed: int) -> None:
    """Seed Python's and NumPy's generators. What the script has seeded or used at its top stays as it has left it.

    That is the same on all ranks, and at each start of a process that starts again.
    """
    import numpy as np

    global _left
    _left = _left or (random.getstate(), np.random.get_state())
    if _seeded is None or _left[0] == _seeded[0]:
        random.seed(seed)
    else:
        random.setstate(_left[0])
    if _seeded is None or repr(_left[1]) == repr(_seeded[1]):
        np.random.seed(seed)
    else:
        np.random.set_state(_left[1])


def done() -> None:
    """Enable the garbage collector again once everything is loaded; objects that exist now are not scanned.

    Memory that the start has used is returned to the kernel.
    """
    global _collects
    return_freed_memory()
    if _collects:
        _collects = False
        gc.freeze()
        gc.enable()
