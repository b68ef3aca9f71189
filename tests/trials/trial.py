"""What attacks on running jobs share: how one is declared, and a job that an attack watches, disturbs and judges."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MARK = "HVDKIT_TEST_MARK"  # in the environment of all that a job starts
HVDKIT = [sys.executable, "-m", "hvdkit"]
# Two ranks of a small ResNet: a run of 88 updates that takes about ten seconds.
SMALL = ("train", "resnet20-digits", "-np", "2", "model.name=resnet8", "epochs=4", "log_every=1", "tune=none")
UPDATES = 88

Attack = Callable[[Path], str]


class Unexpected(Exception):
    """What an attack has seen, where it is not what was expected."""


DECLARED: dict[str, tuple[str, str, Attack]] = {}  # by GROUP.NAME: what is done, what is expected, and the attack


def attack(expected: str) -> Callable[[Attack], Attack]:
    """Declare an attack: a function of an empty folder that returns what was seen, and raises `Unexpected`.

    `expected` is written before the first try. The docstring says what is done.
    """

    def declared(function: Attack) -> Attack:
        group = function.__module__.rpartition(".")[2]
        declare(f"{group}.{function.__name__}", function.__doc__ or "", expected, function)
        return function

    return declared


def declare(name: str, does: str, expected: str, function: Callable[..., str], *arguments: Any) -> None:
    """Declare an attack GROUP.NAME: the function gets the folder, and then these arguments."""
    DECLARED[name] = " ".join(does.split()), expected, lambda folder: function(folder, *arguments)


def expect(holds: object, seen: str) -> None:
    """Raises `Unexpected` with what was seen where it does not hold."""
    if not holds:
        raise Unexpected(seen)


class Running:
    """A command of hvdkit that runs; `text()` is all that it has printed."""

    def __init__(
        self, words: tuple[str, ...], folder: Path, prefix: tuple[str, ...], environment: dict[str, str]
    ) -> None:
        self.folder, self.mark = folder, uuid.uuid4().hex
        self._printed = folder.parent / f"{folder.name}.{self.mark[:8]}.printed"
        variables = {**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark, **environment}
        with self._printed.open("ab") as printed:
            self.process = subprocess.Popen(
                [*prefix, *HVDKIT, *words, "--out", str(folder)], cwd=ROOT, env=variables, stdout=printed,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def text(self) -> str:
        return self._printed.read_text(errors="replace")

    def line(self, *patterns: str) -> str:
        """The first line with all of these patterns. Raises `Unexpected` where there is none."""
        for line in self.text().splitlines():
            if all(re.search(pattern, line) for pattern in patterns):
                return line
        raise Unexpected(f"no line with {patterns}, status {self.process.returncode}\n{self.text()}")

    def last(self) -> str:
        """The status and the last line."""
        lines = self.text().strip().splitlines()
        return f"status {self.process.returncode}: {lines[-1] if lines else 'nothing was printed'}"

    def updates(self) -> int:
        """The number of the last update that the run's metrics name."""
        with suppress(OSError, ValueError):
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
            return max((json.loads(line).get("step") or 0 for line in lines[:-1]), default=0)
        return 0

    def until(self, what: Callable[[], Any], seconds: float = 120, name: str = "what was waited for") -> Any:
        """Wait until `what` returns something true, and return it. Raises `Unexpected` after `seconds`."""
        ends = time.monotonic() + seconds
        while not (value := what()):
            expect(time.monotonic() < ends, f"after {seconds:.0f} s: not {name}\n{self.text()}")
            time.sleep(0.02)
        return value

    def trains(self, update: int = 1) -> None:
        """Wait until this update is done."""
        ended = self.process.poll
        self.until(lambda: self.updates() >= update or ended() is not None, 300, f"update {update}")
        expect(self.updates() >= update, f"it ended before update {update}\n{self.text()}")

    def pids(self) -> list[int]:
        """All processes that the command has started, itself too."""
        found, mark = [], f"{MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and mark in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
        return found

    def nothing_left(self, seconds: float = 30) -> None:
        """Wait until no process of the command is there."""
        self.until(lambda: not set(self.pids()) - {os.getpid()}, seconds, "the end of all processes")

    def ranks(self) -> dict[int, int]:
        """The process of each rank that runs a recipe's script."""
        found = {}
        for pid in self.pids():
            with suppress(OSError, KeyError, StopIteration):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                rank = next(each for each in environ if each.startswith(b"HOROVOD_RANK="))
                if b"python" in words[0] and words[1].endswith(b".py") and b"/agent/" not in words[1]:
                    found[int(rank.partition(b"=")[2])] = pid
        return found

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.ranks()[rank], number)

    def ended(self, seconds: float = 300) -> int:
        """The exit status, once the command has ended by itself. Raises `Unexpected` after `seconds`."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise Unexpected(f"did not end within {seconds:.0f} s\n{self.text()}") from None

    def ends(self, *statuses: int, seconds: float = 300) -> None:
        """Wait until the command has ended by itself, soundly and with one of these statuses (without any: each)."""
        status = self.ended(seconds)
        self.sound()
        expect(not statuses or status in statuses, f"status {status}\n{self.text()}")

    def end(self) -> None:
        """Kill all that is left."""
        while left := [pid for pid in self.pids() if pid != os.getpid()]:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self.process.wait()

    def result(self) -> dict[str, Any]:
        """result.json. Raises `Unexpected` where there is none."""
        path = self.folder / "result.json"
        expect(path.exists(), f"no result.json\n{self.text()}")
        return dict(json.loads(path.read_text()))

    def sound(self) -> None:
        """No traceback, no fault of hvdkit's own and no raw control character on the terminal."""
        text = self.text()
        for sign in ("Traceback", "a fault of hvdkit's own", "Exception ignored", "object repr", "\x1b]", "\x1b[2J"):
            expect(sign not in text, f"{sign!r} is on the terminal:\n{text[-3000:]}")


@contextmanager
def running(*words: str, out: Path, prefix: tuple[str, ...] = (), **environment: str) -> Iterator[Running]:
    """Run a command of hvdkit that writes to `out`; nothing of it outlives the context."""
    job = Running(words, out, prefix, environment)
    try:
        yield job
    finally:
        job.end()


def ran(*words: str, out: Path, prefix: tuple[str, ...] = (), seconds: float = 180, **environment: str) -> Running:
    """Run a command of hvdkit to its end."""
    with running(*words, out=out, prefix=prefix, **environment) as job:
        job.ended(seconds)
    return job
