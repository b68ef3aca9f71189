"""Runs the commands of a build: their output goes to a log, and they can be cancelled together."""

from __future__ import annotations

import contextlib
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


class Log:
    """The log file of a build, to which the commands that it runs write.

    Raises OSError if the file cannot be made. Once another thread sets `cancelled`, the running command and all later
    ones fail.
    """

    def __init__(self, path: Path, cancelled: threading.Event) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: TextIO = path.open("w", encoding="utf-8")
        self._cancelled = cancelled

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
        # The process group is killed when this end of stdin closes: when cancelled, or when this process dies.
        with subprocess.Popen(
            [sys.executable, "-I", str(_END_WITH_PARENT), *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment),
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            assert process.stdin is not None and process.stdout is not None
            ended = threading.Event()
            stdin = process.stdin

            def end_when_cancelled() -> None:
                while not ended.wait(0.1):
                    if self._cancelled.is_set():
                        with contextlib.suppress(OSError):
                            stdin.close()
                        return

            watcher = threading.Thread(target=end_when_cancelled, daemon=True)
            watcher.start()
            try:
                for line in process.stdout:
                    self._file.write(line)
                    tail.append(line.rstrip())
                    on_line(line)
                status = process.wait()
            finally:
                ended.set()
                watcher.join()
                self._file.flush()
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
