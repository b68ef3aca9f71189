"""What the tests of attacks share: a command line run as a stranger would, and what must hold however it ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT, run

HVDKIT = f"{sys.executable} -m hvdkit"
# A shell sees no path of this checkout from another folder.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def attack(
    folder: Path, command: str | list[str], timeout: float = 90, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a shell's command line, or a list, in a folder."""
    listed = ["bash", "-c", command] if isinstance(command, str) else command
    return run(listed, timeout, cwd=folder, env=os.environ | environment, errors="replace")


def sound(done: subprocess.CompletedProcess[str]) -> None:
    """No traceback, no library's own text, and no fault that hvdkit has not foreseen."""
    printed = done.stdout + done.stderr
    for sign in ("Traceback", "Exception ignored", "validation error", "pydantic", console_fault):
        assert sign not in printed, printed[-2000:]


def refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    """Status 2 and one line a fault, with these words."""
    sound(done)
    assert done.returncode == 2, (done.returncode, done.stdout, done.stderr)
    for word in words:
        assert word in done.stderr, done.stderr


console_fault = "a fault of hvdkit's own"
