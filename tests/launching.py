"""What the tests of hvdkit.launch share: jobs of small Python ranks, and a search for processes left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdkit.launch.crew import Guarded
from hvdkit.launch.hosts import parse_hosts
from hvdkit.launch.job import GRACE_S, Job, prepare
from hvdkit.launch.supervise import supervise

MARK = "HVDKIT_TEST_MARK"

# What every rank's script begins with.
PRELUDE = """
import json, os, signal, subprocess, sys, time
rank = int(os.environ["HOROVOD_RANK"])

def record(kind, message, step=None, at=None):
    path = os.path.join(os.environ["HVDKIT_RANK_DIR"], f"rank-{rank}.failure.json")
    with open(path, "w") as file:
        json.dump({"rank": rank, "host": "localhost", "time": at or time.time(), "step": step, "kind": kind,
                   "message": message}, file)
"""


def job(folder: Path, script: str, np: int = 2, mark: str = "", python: str = sys.executable) -> Job:
    """A job whose ranks run `script` after PRELUDE."""
    return Job(Path(python), ["-c", PRELUDE + script], np, parse_hosts(None, np), {MARK: mark}, folder)


def run_plain(job: Job, on_tick: Callable[[], None] | None = None, grace_s: float = GRACE_S) -> None:
    """Run the job's ranks as the direct launcher does, but without Horovod's rendezvous."""
    prepare(job)
    supervise(
        job,
        [
            Guarded("rank", rank, job.command(), {**job.base_environment(), "HOROVOD_RANK": str(rank)}, grace_s)
            for rank in range(job.np)
        ],
        on_tick,
    )


def marked(mark: str) -> list[int]:
    """The processes that bear the mark in their environment, this one excepted."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


def zombies() -> list[int]:
    """Ended children of this process that it has not reaped."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                stat = (entry / "stat").read_text()
                state, parent = stat[stat.rindex(")") + 1 :].split()[:2]
                if state == "Z" and int(parent) == os.getpid():
                    found.append(int(entry.name))
    return found


def gone_within(mark: str, seconds: float) -> bool:
    """Whether all marked processes end within that time."""
    return wait_until(lambda: not marked(mark), seconds)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition comes true within that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def nothing_left(mark: str) -> Iterator[None]:
    """Fails where a marked process or a zombie is there at the end; kills what is left."""
    try:
        yield
        assert marked(mark) == []
        assert zombies() == []
    finally:
        for pid in marked(mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
