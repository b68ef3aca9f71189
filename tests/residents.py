"""Ranks that stay for a whole file and take cases one by one (resident/rank.py): a framework is loaded once."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.files import write_atomic
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.runtimes.store import find
from tests import hygiene
from tests.conftest import ROOT
from tests.launching import framework_job, wait_until

START = Callable[[str], "Ranks"]


class Ranks:
    """As many ranks as `np`, under the direct launcher, in the runtime of `framework`."""

    def __init__(self, framework: str, folder: Path, np: int = 2) -> None:
        self.np, self.cases, self.asked = np, folder / "cases", 0
        self.cases.mkdir(parents=True)
        self.failure: HvdkitError | None = None
        script = ROOT / "tests" / "resident" / "rank.py"
        job = framework_job(framework, folder / "logs", script, framework, self.cases, np=np)
        job = replace(job, stall_timeout_s=0)  # they wait for cases
        self.thread = threading.Thread(target=self._run, args=(job,))
        self.thread.start()

    def _run(self, job: Job) -> None:
        try:
            LAUNCHERS["direct"].run(job)
        except HvdkitError as failure:
            self.failure = failure

    def begin(self, work: str, **arguments: Any) -> None:
        """Ask all ranks for one of rank.py's `WORK`."""
        case = {"work": work, "arguments": {name: _plain(value) for name, value in arguments.items()}}
        write_atomic(self.cases / f"{self.asked}.json", json.dumps(case))
        self.asked += 1

    def do(self, work: str, timeout_s: float = 180, **arguments: Any) -> Any:
        """Rank 0's value, or the request that all ranks refuse: {"status", "message"}."""
        self.begin(work, **arguments)
        places = [self.cases / f"{self.asked - 1}.rank-{rank}.json" for rank in range(self.np)]

        def answers() -> list[dict[str, Any]]:
            return [json.loads(place.read_text()) for place in places if place.exists()]

        def settled() -> bool:
            known = answers()
            return len(known) == self.np or any(each["fault"] for each in known) or not self.thread.is_alive()

        assert wait_until(settled, timeout_s), f"{work}: no answer within {timeout_s} s"
        found = answers()
        assert len(found) == self.np and not any(each["fault"] for each in found), (self.failure, found)
        assert len({json.dumps(each["refused"]) for each in found}) == 1, found
        return found[0]["refused"] or found[0]["value"]

    def kill(self) -> HvdkitError | None:
        """SIGKILL to every rank at once, as from the kernel; what the launcher says of it."""
        places = [self.cases / f"rank-{rank}.pid" for rank in range(self.np)]
        for pid in [int(place.read_text()) for place in places]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.thread.join(hygiene.patience(60))
        return self.failure

    def end(self) -> None:
        """Let them end by themselves; no harm where they have ended already."""
        if self.thread.is_alive():
            write_atomic(self.cases / f"{self.asked}.json", "null")
            self.thread.join(hygiene.patience(20))
        if self.thread.is_alive():  # one of them is at a case that has failed on another
            self.kill()
        assert not self.thread.is_alive(), "ranks outlive their end"


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, Path) else value


@contextmanager
def residents(folder: Path) -> Iterator[START]:
    """A function from a framework to its ranks, started when they are first asked for; Keras shares TensorFlow's."""
    made: dict[str, Ranks] = {}

    def ranks(framework: str) -> Ranks:
        name = find(framework).name
        if name not in made:
            made[name] = Ranks(framework, folder / name)
        return made[name]

    try:
        yield ranks
    finally:
        for each in made.values():
            each.end()
