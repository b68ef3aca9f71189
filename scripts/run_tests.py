"""Run the tests: `make test` all of them, `make check` those that start no ranks.

    python scripts/run_tests.py [--check] [PYTEST ARGUMENTS...]

Tests that start ranks run file by file in several streams at once, since much of their time is spent waiting. Tests
marked `check` start no ranks and read no clock: they run on the time that the streams leave (SCHED_IDLE), and like
others once these have ended; their output comes at the end.

The exit status is 0 where all passed, 130 after Ctrl-C, else that of the part that fared worst. However it ends, no
process is left: they carry a mark in their environment. One that a test leaves behind is named, and is a failure.
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
from pathlib import Path

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


def step_back() -> None:
    """In the child: take no time that anybody else wants.

    Where the kernel shares the processors among sessions (autogroup), SCHED_IDLE counts only within one: then the whole
    session steps back.
    """
    os.setsid()
    with contextlib.suppress(OSError):
        Path("/proc/self/autogroup").write_text("19")
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def marked(mark: str) -> dict[int, str]:
    """The command lines of all processes that carry the mark, by their ids."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                found[int(entry.name)] = command.decode(errors="replace")
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


def main(arguments: list[str]) -> int:
    """The exit status."""
    more = [argument for argument in arguments if argument != "--check"]
    mark, cores = uuid.uuid4().hex, len(os.sched_getaffinity(0))
    compileall.compile_dir(ROOT / "hvdkit", quiet=2)  # or thousands of processes do it, where Python writes no bytecode
    for number in (signal.SIGTERM, signal.SIGHUP):  # as good as a Ctrl-C, unless whoever started this ignores them
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler)
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile() as quiet:

        def start(*words: str, **options: object) -> None:
            command, environment = [sys.executable, "-m", "pytest", *words, *more], os.environ | {MARK: mark}
            options |= {"cwd": ROOT, "env": environment, "stdin": subprocess.DEVNULL}
            processes.append(subprocess.Popen(command, **options))  # type: ignore[call-overload]

        try:
            if "--check" in arguments:
                start("-n", str(cores), "--dist", "worksteal", "-m", "check")
            else:
                start("-n", str(streams()), "--dist", "loadfile", "--no-loadscope-reorder", "-m", "not check")
                # What failed last is for one of them to write down.
                idle = {"stdout": quiet, "stderr": subprocess.STDOUT, "preexec_fn": step_back}
                start("-p", "no:cacheprovider", "-m", "check", **idle)
            statuses = [process.wait() for process in processes]
            quiet.seek(0)
            print(quiet.read().decode(errors="replace"))
            behind = left_behind(mark, GONE_S)
            print(*(f"left behind by a test, and killed: {line}" for line in behind), sep="\n", flush=True)
            return max(0 if status == NO_TESTS else abs(status) for status in statuses) or int(bool(behind))
        except KeyboardInterrupt:
            for process in processes:
                process.send_signal(signal.SIGINT)  # Ctrl-C on a terminal has told it already
            with contextlib.suppress(KeyboardInterrupt):
                left_behind(mark, FAREWELL_S)
            left_behind(mark, 0)
            print("interrupted; all processes of the tests are gone", flush=True)
            return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
