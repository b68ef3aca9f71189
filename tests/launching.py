"""What the tests of hvdkit.launch share: jobs of small Python ranks, and a search for processes left behind.

A test finds its own processes by a mark in their environment, and its own zombies, which have none any more, as
children that this process did not have before. What other tests have started or left behind is not its concern.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdkit.launch.hosts import parse_hosts
from hvdkit.launch.job import AgentCommand, Job, prepare
from hvdkit.launch.supervise import supervise
from hvdkit.runtimes.store import find
from tests import hygiene

ROOT = Path(__file__).resolve().parent.parent
MARK = "HVDKIT_TEST_MARK"
# How long to wait for what must happen: only a limit, far longer than any machine takes. Ranks that are to be ended
# `hang` for much longer than a test may last.
SOON_S = 60.0

# What every rank's script begins with.
PRELUDE = """
import json, os, signal, subprocess, sys, time
rank = int(os.environ["HOROVOD_RANK"])

def hang():
    time.sleep(600)

def say(what):
    open(os.path.join(os.environ["HVDKIT_RANK_DIR"], what), "w").close()

def wait_for(what):
    while not os.path.exists(os.path.join(os.environ["HVDKIT_RANK_DIR"], what)):
        time.sleep(0.01)

def tell_pid():
    path = os.path.join(os.environ["HVDKIT_RANK_DIR"], f"pid-{rank}")
    with open(path + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".new", path)

def gone(other):
    wait_for(f"pid-{other}")
    with open(os.path.join(os.environ["HVDKIT_RANK_DIR"], f"pid-{other}")) as file:
        path = "/proc/" + file.read()
    while os.path.exists(path):
        time.sleep(0.001)

def record(kind, message, step=None, at=None):
    path = os.path.join(os.environ["HVDKIT_RANK_DIR"], f"rank-{rank}.failure.json")
    with open(path, "w") as file:
        json.dump({"rank": rank, "host": "localhost", "time": time.time(), "clock": at or time.monotonic(),
                   "step": step, "kind": kind, "message": message}, file)
"""


def framework_job(framework: str, folder: Path, *arguments: object, np: int = 2, **environment: str) -> Job:
    """A job whose ranks run a script in the framework's runtime; each on one thread, as two of them share two cores."""
    runtime = find(framework)
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    variables["HOROVOD_IDLE_CYCLE_TIME"] = "100"  # Horovod's thread sleeps, as in training
    words = [str(each) for each in arguments]
    return Job(runtime.python, words, np, parse_hosts(None, np), runtime.environment | variables | environment, folder)


def job(folder: Path, script: str, np: int = 2, mark: str = "", python: str = sys.executable) -> Job:
    """A job whose ranks run `script` after PRELUDE."""
    environment = {MARK: mark, "PYTHONPATH": str(ROOT)}
    return Job(Path(python), ["-c", PRELUDE + script], np, parse_hosts(None, np), environment, folder)


def run_plain(job: Job, on_tick: Callable[[], None] | None = None) -> None:
    """Run the job's ranks as the direct launcher does, but without Horovod's rendezvous."""
    prepare(job)
    supervise(
        job,
        [
            AgentCommand(rank, job.command(), {**job.base_environment(), "HOROVOD_RANK": str(rank)})
            for rank in range(job.np)
        ],
        on_tick,
    )


def marked(mark: str) -> list[int]:
    """The processes that bear the mark in their environment, this one excepted."""
    return hygiene.started_by(mark, MARK)


def children() -> dict[int, str]:
    """This process's children, and the letter of each one's state: Z where it has ended and is not reaped."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError, ValueError):
                stat = (entry / "stat").read_text(errors="replace")
                state, parent = stat[stat.rindex(")") + 1 :].split()[:2]
                if int(parent) == os.getpid():
                    found[int(entry.name)] = state
    return found


def gone_within(mark: str, seconds: float) -> bool:
    """Whether all marked processes end within that time."""
    return wait_until(lambda: not marked(mark), seconds)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether the condition comes true within that time, or a while after it (hygiene.patience)."""
    deadline = time.monotonic() + hygiene.patience(seconds)
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@contextmanager
def nothing_left(mark: str) -> Iterator[None]:
    """Fails where a marked process, or a new child as a zombie, is there at the end; takes away what is left."""
    before = children()

    def new_zombies() -> list[int]:
        return [pid for pid, state in children().items() if state == "Z" and pid not in before]

    try:
        yield
        assert marked(mark) == []
        assert new_zombies() == []
    finally:
        # What is killed may have started another one before.
        wait_until(lambda: not _killed(mark), SOON_S)
        for pid in new_zombies():
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def _killed(mark: str) -> list[int]:
    """The marked processes, which get SIGKILL."""
    found = marked(mark)
    for pid in found:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return found


def exits(folder: Path) -> list[dict[str, object]]:
    """What a job's exits.json says, in rank order."""
    rows: list[dict[str, object]] = json.loads((folder / "exits.json").read_text())
    return rows
