"""Pieces of work that need nothing of each other, done by two processes: a report is mostly charts, each for itself."""

from __future__ import annotations

import os
import pickle
import signal
import warnings
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")


def abreast(wanted: dict[str, Callable[[], T]]) -> dict[str, T]:
    """What each gives, by its name; where there are two cores, a forked child takes pieces as this process does.

    The child has all that is in memory, so nothing is handed to it; what it gives goes back through a pipe and must be
    picklable. What it does not give, for whatever reason, is done here, so that an error is raised as without it.
    """
    names = list(wanted)
    if len(names) < 2 or len(os.sched_getaffinity(0)) < 2:
        return {name: give() for name, give in wanted.items()}
    queue, fill = os.pipe()
    os.write(fill, bytes(range(len(names))))  # a byte for each piece; who is free takes the next one
    os.close(fill)
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # NumPy's idle threads: the child starts none, needs none
        child = os.fork()
    if child == 0:
        _answer(queue, reading, writing, wanted)
    os.close(writing)
    status = None
    try:
        with os.fdopen(reading, "rb") as answer:
            made = _taken(queue, wanted)
            text = answer.read()
        _, status = os.waitpid(child, 0)
    finally:
        os.close(queue)
        if status is None:  # an error here, or an interrupt
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if status == 0:
        made |= pickle.loads(text)
    return {name: made[name] if name in made else wanted[name]() for name in names}


def _answer(queue: int, reading: int, writing: int, wanted: dict[str, Callable[[], T]]) -> NoReturn:
    """The child: does its share, gives it and ends, without what a process does at its end: that is the parent's."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # it dies at once, and the parent speaks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(reading)
        with os.fdopen(writing, "wb") as file:
            file.write(pickle.dumps(_taken(queue, wanted)))
        status = 0
    finally:
        os._exit(status)


def _taken(queue: int, wanted: dict[str, Callable[[], T]]) -> dict[str, T]:
    """What this process takes from the queue, done."""
    names, made = list(wanted), {}
    while place := os.read(queue, 1):
        name = names[place[0]]
        made[name] = wanted[name]()
    return made
