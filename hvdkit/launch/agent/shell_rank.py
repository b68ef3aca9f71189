"""How an agent stays above a rank that horovodrun ends; death signals and exit statuses.

Standard library only, and no syntax newer than Python 3.8: see rank_agent.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time

from hvdkit.launch.agent.reports import Reports, write_line

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def step_aside(reports: Reports) -> int | None:
    """Fork; the child continues (None), the parent gets the child's exit status. Where the child, and so the rank, is
    killed, the parent reports it.

    To end a rank, horovodrun sends SIGTERM to the children of the process it started, then freezes that process. It
    starts a shell, which may stay or become its command: so the first or the second process from there gets the
    signal. The agent is always the second, and what is frozen is never the agent.
    """
    child = os.fork()
    if child == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        return None
    signals = []

    def pass_on(number: int, _: object) -> None:
        signals.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number)

    signal.signal(signal.SIGTERM, pass_on)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        write_line(b"")  # the child's last line may have no end
        facts = {"exit_code": None, "signal": os.WTERMSIG(status), "stopped": bool(signals)}
        reports.send("ended", failed_at=time.monotonic(), **facts)
        reports.send("left")
    return exit_status(status)


def prctl(option: int, value: int) -> None:
    """prctl(2), Linux only; its failure is ignored."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def exit_status(status: int) -> int:
    """A waitpid status as a shell shows it."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
