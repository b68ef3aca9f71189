"""The signals that end a job, while it runs."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in the list that this yields; they are handled at the next tick.

    SIGHUP stays ignored where it is, as under nohup.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may set handlers
        return
    before = {
        number: signal.signal(number, lambda received, _: caught.append(received))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield caught
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was not set from Python, and cannot be set from it
                signal.signal(number, handler)
