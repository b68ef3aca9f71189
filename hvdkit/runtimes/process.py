"""Runs the commands of a build: their output goes to a log, and they can be cancelled together."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO

from hvdkit.errors import RunError

_END_WITH_PARENT = Path(__file__).with_name("end_with_parent.py")
_TAIL_LINES = 12


def output(command: Sequence[str | Path]) -> str | None:
    """What `command` prints; None if it is missing, fails or takes longer than 20 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or done.stderr.strip()


def environment(python: Path) -> dict[str, str]:
    """The variables for a runtime's programs: its folder first on PATH, no modules of another Python."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return inherited | {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def pip(python: Path, *arguments: str | Path) -> list[str | Path]:
    """The command line of the interpreter's pip that asks nothing: a command of pip's, then its options."""
    return [python, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def foreign_pip(python: Path, *arguments: str | Path) -> list[str | Path]:
    """The command line of hvdkit's own pip that works on the environment of `python`, which needs no pip."""
    return pip(Path(sys.executable), "--python", python, *arguments)


class Cancellation(threading.Event):
    """Set to cancel builds, by any thread. `stdin` is a pipe of which the other end closes then, or as this process
    dies."""

    def __init__(self) -> None:
        super().__init__()
        self.stdin, self._other_end = os.pipe()

    def set(self) -> None:
        """Cancel; only once."""
        super().set()
        os.close(self._other_end)


class Log:
    """The log file of a build, to which the commands that it runs write.

    Raises OSError if the file cannot be made. Once `cancelled` is set, the running command and all later ones fail.
    """

    def __init__(self, path: Path, cancelled: Cancellation) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._cancelled = cancelled

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def write(self, text: str) -> None:
        """Add a line."""
        self._file.write(text + "\n")
        self._file.flush()

    def run(
        self,
        stage: str,
        command: Sequence[str | Path],
        *,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        on_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Run `command`, with its output in the log; each line also goes to `on_line`.

        Raises RunError if it fails or is cancelled, with `stage` (what was being done), the relevant lines of its
        output and the path of the log.
        """
        words = [str(word) for word in command]
        self.write(f"$ {' '.join(words)}")
        tail: deque[str] = deque(maxlen=400)
        # The process group is killed when the other end of stdin closes.
        with subprocess.Popen(
            [sys.executable, "-I", str(_END_WITH_PARENT), *words],
            stdin=self._cancelled.stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                self._file.write(line)
                tail.append(line.rstrip())
                on_line(line)
            self._file.flush()
            status = process.wait()
        if self._cancelled.is_set():
            raise RunError(f"{stage}: cancelled")
        if status != 0:
            end = "\n".join(f"    {line}" for line in relevant(tail))
            raise RunError(f"{stage} failed (exit status {status}); the whole log: {self.path}\n{end}")


def relevant(lines: Sequence[str] | deque[str]) -> list[str]:
    """The lines that show why a build failed: from its first error on, or else the last ones."""
    kept = [line for line in lines if line.strip()]
    for number, line in enumerate(kept):
        if "error:" in line or line.startswith("ERROR") or "CMake Error" in line:
            return kept[number : number + _TAIL_LINES]
    return kept[-_TAIL_LINES:]
