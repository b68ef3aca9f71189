"""Prepares samples ahead of the training loop, in threads, in order."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Generator
from typing import Any, Literal, TypeVar

T = TypeVar("T")

_MOST = 16  # threads with `auto`


def in_order(make: Callable[[int], T], count: int, workers: int, ahead: int) -> Generator[T, None, None]:
    """Yields make(0), …, make(count − 1), computed by `workers` threads that are at most about `ahead` calls ahead.

    With 0 workers each call runs when its result is needed. An exception of a call is raised when its result is
    needed. Closing or deleting the generator ends the threads.
    """
    if workers == 0:
        yield from map(make, range(count))
        return
    grain = _grain()
    options = grain.ReadOptions(num_threads=workers, prefetch_buffer_size=max(ahead, workers))
    results = iter(grain.MapDataset.range(count).map(make).to_iter_dataset(options))
    try:
        for _ in range(count):
            yield next(results)
    finally:
        results.close()


def _grain() -> Any:
    absl = logging.getLogger("absl")
    level = absl.level
    absl.setLevel(logging.ERROR)  # grain would warn that JAX's profiler is missing
    try:
        import grain
    finally:
        absl.setLevel(level)
    return grain


def threads(workers: int | Literal["auto"], local_size: int) -> int:
    """The number of threads of a rank: with `auto`, the cores of this host divided by its ranks, from 1 to 16."""
    if workers != "auto":
        return workers
    return min(_MOST, max(1, len(os.sched_getaffinity(0)) // local_size))
