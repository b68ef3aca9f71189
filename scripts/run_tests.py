"""Run the whole suite, in less time than one after the other: `make test`.

Tests that start ranks wait a good part of their time. Those that start none and look at no clock, marked `beside` in
tests/conftest.py, run meanwhile on what the others leave of the processors (SCHED_IDLE), so these are hardly disturbed.
The others' output is shown as it comes, theirs at the end. The exit status is that of the half that fared worse.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTEST = [sys.executable, "-m", "pytest"]


def step_back() -> None:
    """In the child: take no time that anybody else wants."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> int:
    """The exit status."""
    with tempfile.TemporaryFile("w+") as told:
        # Without the cache: what failed last is for the others to write down, not for both at once.
        beside = subprocess.Popen(
            [*PYTEST, "-p", "no:cacheprovider", "-m", "beside"],
            stdout=told, stderr=subprocess.STDOUT, cwd=ROOT, preexec_fn=step_back,
        )  # fmt: skip
        try:
            others = subprocess.run([*PYTEST, "-m", "not beside"], cwd=ROOT, check=False).returncode
            status = beside.wait()
        finally:
            beside.terminate()
            beside.wait()
            told.seek(0)
            print("\nTests that start no ranks, which ran meanwhile:", told.read(), sep="\n", flush=True)
    print(f"tests with ranks: exit status {others}; without: {status}")
    return max(others, status, key=abs)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
