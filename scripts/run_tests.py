"""Run the tests: `make test` all of them, `make check` those that start no ranks.

    python scripts/run_tests.py [--check] [PYTEST ARGUMENTS...]

Tests that start ranks run file by file in several streams at once, since much of their time is spent waiting. Tests
marked `check` start no ranks and read no clock: they run on the time that the streams leave (SCHED_IDLE), and like
others once these have ended; their output comes at the end. hvdkit is compiled first: where Python writes no bytecode
(PYTHONDONTWRITEBYTECODE), thousands of processes would each do it again.

The last line counts all tests. The exit status is 0 where all passed, 130 after Ctrl-C, else that of the part that
fared worst. Whatever way it ends, no process is left: all of them carry a mark in their environment, by which they are
found. A process that a test leaves behind is named, and is a failure.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
MARK = "HVDKIT_TEST_SUITE"
NO_TESTS = 5  # pytest's exit status where no test fits the arguments
FAREWELL_S = 30.0  # for what an interrupted test has to clean up
GONE_S = 10.0  # for helpers that end by themselves once their parent is gone


def streams() -> int:
    """How many tests with ranks run at once: most start two ranks, and wait a third of the time.

    Three on two cores, fewer where there is little memory.
    """
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return max(2, min(3 * len(os.sched_getaffinity(0)) // 2, memory_gib // 5))


@dataclass
class Part:
    """One pytest: what it runs, and what became of it."""

    title: str
    arguments: list[str]
    folder: Path
    idle: bool = False  # takes no time that anybody else wants, and shows its output at the end
    process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> Path:
        return self.folder / f"{self.title}.txt"

    @property
    def results(self) -> Path:
        return self.folder / f"{self.title}.xml"

    def start(self, mark: str) -> Part:
        command = [sys.executable, "-m", "pytest", f"--junitxml={self.results}", *self.arguments]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output if self.idle else None,
                stderr=subprocess.STDOUT if self.idle else None, env=os.environ | {MARK: mark},
                preexec_fn=step_back if self.idle else None,
            )  # fmt: skip
        return self

    def wait(self) -> int:
        """The exit status; 0 where there was nothing to run."""
        assert self.process
        status = self.process.wait()
        if self.idle:
            print(f"\nMeanwhile, {self.title}:\n{self.output.read_text(errors='replace')}", flush=True)
        return 0 if status == NO_TESTS else status

    def counts(self) -> tuple[Counter[str], list[str]]:
        """How many tests ended how, and the names of those that did not pass."""
        found: Counter[str] = Counter()
        bad = []
        for case in ElementTree.parse(self.results).iter("testcase") if self.results.exists() else ():
            ends = {child.tag for child in case} & {"failure", "error", "skipped"}
            for end in ends or {"passed"}:
                found[end] += 1
            if ends - {"skipped"}:
                bad.append(f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}")
        return found, bad


def step_back() -> None:
    """In the child: take no time that anybody else wants.

    Where the kernel shares the processors among sessions (autogroup), SCHED_IDLE counts only within one: then the whole
    session steps back.
    """
    os.setsid()
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def step_forward(mark: str) -> None:
    """Let all processes that carry the mark have their share of the time again, where the user may: root may."""
    for pid in marked(mark):
        with contextlib.suppress(OSError):  # it has ended
            Path(f"/proc/{pid}/autogroup").write_text("0")
        for thread in Path(f"/proc/{pid}/task").glob("*"):
            with contextlib.suppress(OSError):
                os.sched_setscheduler(int(thread.name), os.SCHED_OTHER, os.sched_param(0))


def marked(mark: str) -> dict[int, str]:
    """The command lines of all processes that carry the mark, by their ids."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found[int(entry.name)] = (
                        (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    )
    return found


def left_behind(mark: str, seconds: float) -> list[str]:
    """Kill what is still there after so many seconds; its command lines."""
    deadline = time.monotonic() + seconds
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)
    first = marked(mark)
    while found := marked(mark):  # what they start meanwhile carries the mark too
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [f"{pid}: {command}" for pid, command in first.items()]


def plan(check: bool, more: list[str], folder: Path) -> list[Part]:
    """The parts, which run at once."""
    if check:
        number = ["-n", str(len(os.sched_getaffinity(0)))]
        return [Part("check", [*number, "--dist", "worksteal", "-m", "check", *more], folder)]
    workers = ["-n", str(streams()), "--dist", "loadfile", "--no-loadscope-reorder"]
    quiet = ["-p", "no:cacheprovider"]  # what failed last is for one of them to write down
    return [
        Part("ranks", [*workers, "-m", "not check", *more], folder),
        Part("tests without ranks", [*quiet, "-m", "check", *more], folder, idle=True),
    ]


def run(parts: list[Part], mark: str) -> list[int]:
    """Run all parts, idle ones last; their exit statuses."""
    statuses = []
    for part in [part.start(mark) for part in parts]:
        if part.idle:  # the others have ended
            step_forward(mark)
        statuses.append(part.wait())
    return statuses


def conclude(parts: list[Part], statuses: list[int], behind: list[str]) -> int:
    """Say what became of the tests; the exit status."""
    total: Counter[str] = Counter()
    for part in parts:
        found, bad = part.counts()
        total += found
        for name in bad:
            print(f"not passed: {name}")
        if not part.results.exists():
            print(f"{part.title}: pytest ended without results")
    for line in behind:
        print(f"left behind by a test, and killed: {line}")
    words = [f"{total['passed']} passed", f"{total['failure']} failed"]
    words += [f"{total[key]} {name}" for key, name in (("error", "errors"), ("skipped", "skipped")) if total[key]]
    print(", ".join(words), flush=True)
    worst = max(statuses, key=abs, default=0)
    return worst or int(bool(behind))


@contextlib.contextmanager
def interrupted_by(*numbers: signal.Signals) -> Iterator[None]:
    """Signals that are as good as a Ctrl-C, where whoever started this does not ignore them."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    yield


def main(arguments: list[str]) -> int:
    """The exit status."""
    check = "--check" in arguments
    more = [argument for argument in arguments if argument != "--check"]
    mark = uuid.uuid4().hex
    compileall.compile_dir(ROOT / "hvdkit", quiet=2)
    with tempfile.TemporaryDirectory(prefix="hvdkit-tests-") as folder, interrupted_by(signal.SIGTERM, signal.SIGHUP):
        parts = plan(check, more, Path(folder))
        try:
            statuses = run(parts, mark)
            return conclude(parts, statuses, left_behind(mark, GONE_S))
        except KeyboardInterrupt:
            for part in (part for part in parts if part.process and part.process.poll() is None):
                assert part.process
                part.process.send_signal(signal.SIGINT)  # Ctrl-C on a terminal has told it already
            deadline = time.monotonic() + FAREWELL_S
            with contextlib.suppress(KeyboardInterrupt):
                while marked(mark) and time.monotonic() < deadline:
                    time.sleep(0.1)
            left_behind(mark, 0)
            print("interrupted; all processes of the tests are gone", flush=True)
            return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
