"""Runs the commands of a build: their output goes to a log, and they can be cancelled together."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from hvdkit.errors import RunError
from hvdkit.programs import answer

_END_WITH_PARENT = Path(__file__).with_name("end_with_parent.py")
_SHOWN_LINES = 12
# Where an output begins to show why a command failed: at the first error of a compiler, a linker or CMake, or else of
# pip, which ends with its own summary of a build.
_ERRORS = (
    re.compile(r"\S ?: (fatal )?error: |nvcc fatal|undefined reference to |CMake Error|\bld: "),
    re.compile(r"^\s*error: |^ERROR"),
)
_MORE_ROOM = "free space, or name folders with more in HVDKIT_RUNTIMES, XDG_CACHE_HOME and TMPDIR"
# What a command says if its failure has nothing to do with what it did: the cause, and the remedy.
_KILLED = "the compiler was killed, as a rule for lack of memory; free some, or set MAKEFLAGS=-j1"
_CAUSES = {
    "No space left on device": f"the disk is full; {_MORE_ROOM}",
    "Killed signal terminated program": _KILLED,  # gcc
    "died due to signal 9": _KILLED,  # nvcc
    "unable to execute command: Killed": _KILLED,  # clang
    "] Error 137": _KILLED,  # make, of a command that was killed itself
}
_ANSWER_S = 120
_PRINT_VERSION = "import sys; print('%d.%d.%d' % sys.version_info[:3])"


def output(command: Sequence[str | Path]) -> str | None:
    """What `command` prints; None if it is missing, fails or takes longer than 20 s."""
    try:
        done = answer(command, 20.0)
    except (OSError, subprocess.SubprocessError):
        return None
    if done.returncode != 0:
        return None
    return done.stdout.strip() or done.stderr.strip()


def ask(
    python: Path, oldest: tuple[int, int], script: Path, *arguments: str, keys: set[str], **variables: str
) -> dict[str, Any]:
    """The JSON object with `keys` that `script`, run by the interpreter `python`, prints as its last line.

    Raises RunError if `python` cannot be run, does not answer, or is older than `oldest`.
    """
    command: list[str | Path] = [python, script, *arguments]
    try:
        done = answer(command, _ANSWER_S, environment(python) | variables)
        reported: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if keys <= reported.keys():
            return reported
    except OSError as error:
        raise RunError(f"{python}: cannot be run ({error.strerror}); name a Python interpreter") from error
    except subprocess.TimeoutExpired:
        raise RunError(f"{python}: no answer within {_ANSWER_S} s; name a Python interpreter") from None
    except (ValueError, IndexError, AttributeError):
        pass
    wanted = f"expected CPython {oldest[0]}.{oldest[1]} or later"
    version = output([python, "-c", _PRINT_VERSION]) or ""
    numbers = version.split(".")
    if len(numbers) == 3 and all(map(str.isdigit, numbers)) and tuple(map(int, numbers)) < oldest:
        raise RunError(f"{python}: {wanted}, it is {version}; name another interpreter")
    end = " | ".join(done.stderr.strip().splitlines()[-2:]) or f"exit status {done.returncode}"
    raise RunError(f"{python}: {wanted}, got no answer from it: {end}; name a Python interpreter")


def environment(python: Path) -> dict[str, str]:
    """The variables for a runtime's programs: its folder first on PATH, no modules of another Python."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return inherited | {"PATH": f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def pip(python: Path, *arguments: str | Path) -> list[str | Path]:
    """The command line of hvdkit's own pip that works on the environment of `python`, which needs no pip, and asks
    nothing: a command of pip's, then its options."""
    own = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    return [*own, "--python", python, *arguments]


def pip_of(python: Path, has_pip: bool) -> str:
    """The command that a user types for the pip of `python`, which is hvdkit's if it has none."""
    own = f"{shlex.quote(sys.executable)} -m pip --python {shlex.quote(str(python))}"
    return f"{shlex.quote(str(python))} -m pip" if has_pip else own


class Cancellation(threading.Event):
    """Set to cancel builds, by any thread. `stdin` is a pipe of which the other end closes then, or as this process
    dies."""

    def __init__(self) -> None:
        super().__init__()
        self._other_end: int | None
        self.stdin, self._other_end = os.pipe()

    def set(self) -> None:
        """Cancel."""
        super().set()
        end, self._other_end = self._other_end, None
        if end is not None:
            os.close(end)


class BuildLog:
    """The log file of a build, to which the commands that it runs write.

    Raises RunError if the file cannot be made; if the disk is full, the build continues without it. Once `cancelled` is
    set, the running command and all later ones fail.
    """

    def __init__(self, path: Path, cancelled: Cancellation) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = path.open("w", buffering=1, encoding="utf-8")
        except OSError as error:
            raise unwritable(error, path) from error
        self._cancelled = cancelled

    def __enter__(self) -> BuildLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):
            self._file.close()

    def write(self, text: str) -> None:
        """Add a line."""
        with contextlib.suppress(OSError):
            self._file.write(text + "\n")

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

        Raises RunError if it fails or is cancelled, with `stage` (what was being done), the cause or the relevant lines
        of its output, and the path of the log.
        """
        words = [str(word) for word in command]
        self.write(f"$ {' '.join(words)}")
        said = Output()
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
            try:
                for line in process.stdout:
                    self.write(line.removesuffix("\n"))
                    said.add(line)
                    on_line(line)
                status = process.wait()
            except BaseException:  # Ctrl-C in the main thread: leaving `with` would wait for the command's own end
                self._cancelled.set()
                raise
        if self._cancelled.is_set():
            raise RunError(f"{stage}: cancelled")
        if status != 0:
            if said.cause:
                raise RunError(f"{stage} failed: {said.cause}; the whole log: {self.path}")
            end = "\n".join(f"    {line}" for line in said.relevant())
            raise RunError(f"{stage} failed (exit status {status}); the whole log: {self.path}\n{end}")

    def install(self, stage: str, python: Path, *packages: str | Path, **variables: str) -> None:
        """Let pip install packages, with its options, into the environment of `python`. Raises RunError if it fails."""
        command = pip(python, "install", "--progress-bar", "off", *packages)
        self.run(stage, command, environment=environment(python) | variables)


class Output:
    """What of a command's output, which comes line by line, shows why the command failed.

    `cause` is set if that has nothing to do with what the command did: the cause, and the remedy.
    """

    def __init__(self) -> None:
        self.cause: str | None = None
        self._from_errors: list[list[str]] = [[] for _ in _ERRORS]
        self._last: deque[str] = deque(maxlen=_SHOWN_LINES)

    def add(self, line: str) -> None:
        """The next line."""
        line = line.rstrip()
        if not line:
            return
        self._last.append(line)
        self.cause = self.cause or next((cause for said, cause in _CAUSES.items() if said in line), None)
        for error, kept in zip(_ERRORS, self._from_errors, strict=True):
            if (kept or error.search(line)) and len(kept) < _SHOWN_LINES:
                kept.append(line)

    def relevant(self) -> list[str]:
        """The lines from the first error on, or else the last ones."""
        return next(filter(None, self._from_errors), [*self._last])


def unwritable(error: OSError, path: Path) -> RunError:
    """The error of a build for one of a file, which is in `place` if the error does not say it."""
    room = _MORE_ROOM if error.errno in (errno.ENOSPC, errno.EDQUOT) else "set HVDKIT_RUNTIMES to a folder of yours"
    return RunError(f"{error.filename or path}: cannot be written ({error.strerror}); {room}")
