"""The output of all ranks on the terminal, from the files that their agents write: each line with its rank."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hvdkit.launch.agent.output import SAID, is_logged

_LOOK_S = 0.1
_CHUNK_BYTES = 2**18
_MOST_BEHIND_BYTES = 2**23  # of a rank; what is more is only in its file
_BAR_S = 5.0  # between two states of a progress bar, which has no line of its own yet
_LAST_S = 10.0  # to print the rest, once the ranks have ended
_NUMBER = re.compile(r"\d+")


@contextmanager
def followed(logs: Path, quiet: bool) -> Iterator[None]:
    """Print what ranks write into `logs` meanwhile, on standard output.

    A thread does it: a terminal or pipe that takes nothing for a while delays no rank, and no signal. A rank that
    prints more than can be shown has its last lines shown, with how much is left out. With `quiet`, what Horovod itself
    logs stays in the files: its inspector repeats every few seconds what the launcher tells once.
    """
    over = threading.Event()
    thread = threading.Thread(target=_follow, args=(logs, over, quiet), name="output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(_LAST_S)


def _follow(logs: Path, over: threading.Event, quiet: bool) -> None:
    """Print until it is `over`, and then what is left. Stops where nobody reads any more."""
    tails: dict[Path, _Tail] = {}
    with suppress(OSError, ValueError):  # a closed pipe
        while True:
            last = over.wait(_LOOK_S)
            for path in sorted([*logs.glob("rank-*.log"), *logs.glob("worker-*.log")]):
                if path not in tails:
                    tails[path] = _Tail(path, quiet)
            while [tail for tail in tails.values() if tail.show()] and last:
                pass
            if last:
                for tail in tails.values():
                    tail.end()
            sys.stdout.flush()
            if last:
                return


class _Tail:
    """What has been shown of one rank's file. It may be begun anew, by a rank that takes the place of a lost one.

    Where it is removed, the rank still writes into it, so it is read on.
    """

    def __init__(self, path: Path, quiet: bool) -> None:
        self._path, self._quiet = path, quiet
        numbers = _NUMBER.findall(path.stem)
        self._who = f"[{numbers[0] if path.stem.startswith('rank-') else path.stem.removeprefix('worker-')}] "
        self._file: BinaryIO | None = None
        self._offset, self._unfinished, self._bar_at = 0, b"", 0.0

    def show(self) -> bool:
        """Print the next lines; whether there are more. An unreadable file has none."""
        with suppress(OSError):  # opened anew each time, as a network file system shows new content only then
            file = self._path.open("rb")
            if self._file is not None:
                self._file.close()
            self._file = file
        if self._file is None:
            return False
        size = self._file.seek(0, 2)
        if size < self._offset:
            self._offset, self._unfinished = 0, b""
        if size - self._offset > _MOST_BEHIND_BYTES:
            skipped = size - self._offset - _CHUNK_BYTES
            self._offset += skipped
            self._unfinished = b""
            print(f"{self._who}… {skipped / 2**20:.1f} MiB more, in {self._path}")
        self._file.seek(self._offset)
        data = self._file.read(_CHUNK_BYTES)
        self._offset += len(data)
        *lines, self._unfinished = (self._unfinished + data).split(b"\n")
        for line in lines:
            self._print(line)
        if len(self._unfinished) > _CHUNK_BYTES:
            self._print(self._unfinished)
            self._unfinished = b""
        bar = self._unfinished.rpartition(b"\r")[0]
        if bar and time.monotonic() > self._bar_at + _BAR_S:
            self._print(bar)
        return len(data) == _CHUNK_BYTES

    def end(self) -> None:
        """Print a last line that has no end."""
        if self._unfinished:
            self._print(self._unfinished)
        if self._file is not None:
            self._file.close()

    def _print(self, line: bytes) -> None:
        """Of a line that was overwritten, what was last seen. Lines for the user are printed as they are reported."""
        self._bar_at = time.monotonic()
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        if not text.startswith(SAID) and not (self._quiet and is_logged(text)):
            print(f"{self._who}{text}")
