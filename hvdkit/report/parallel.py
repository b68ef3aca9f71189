"""Independent calls shared by two processes. A report is mostly charts, each drawn by itself."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TypeVar

T = TypeVar("T")


def call_all(functions: dict[str, Callable[[], T]]) -> dict[str, T]:
    """The results of the functions, by name. With two cores or more, a forked child calls some of them.

    The child shares this process's memory, and sends its results back through a pipe, so they must be picklable. If it
    fails, this process calls what is missing, and an error is raised here. A process pool would need semaphores in
    /dev/shm, which not every container has.
    """
    # A child of a process with several threads, such as a notebook's kernel, could wait for a lock for ever.
    alone = threading.active_count() == 1
    if len(functions) < 2 or len(os.sched_getaffinity(0)) < 2 or not alone:
        return {name: function() for name, function in functions.items()}
    queue, fill = os.pipe()
    os.write(fill, bytes(range(len(functions))))  # a byte for each function; whichever process is free takes the next
    os.close(fill)
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_send, args=(receiving, sending, queue, functions))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # NumPy has idle threads, which the child does not use
            child.start()
        sending.close()
        results = _take(queue, functions)
        with contextlib.suppress(EOFError, OSError):  # the child has failed
            results |= receiving.recv()
    finally:
        os.close(queue)
        receiving.close()
        if child.pid is not None:
            child.kill()
            child.join()
    return {name: results[name] if name in results else function() for name, function in functions.items()}


def _send(receiving: Connection, sending: Connection, queue: int, functions: dict[str, Callable[[], T]]) -> None:
    """The child's work. It ends silently: the parent reports errors and signals."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    receiving.close()  # so that a write fails once the parent is gone
    with contextlib.suppress(Exception):
        sending.send(_take(queue, functions))


def _take(queue: int, functions: dict[str, Callable[[], T]]) -> dict[str, T]:
    """Call the functions that this process takes from the queue."""
    names, results = list(functions), {}
    while index := os.read(queue, 1):
        name = names[index[0]]
        results[name] = functions[name]()
    return results
