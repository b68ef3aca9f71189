"""The file `metrics.jsonl`, which rank 0 writes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from hvdkit.core.step_plan import Progress
from hvdkit.errors import RunError
from hvdkit.files import atomic, unwritable
from hvdkit.results.train import MetricLine, read_metrics, scan_metrics

if TYPE_CHECKING:
    from hvdkit.handlers.tensorboard import EventFile


def is_before(line: MetricLine, progress: Progress, recounted: bool) -> bool:
    """Whether a line of metrics.jsonl belongs to the training before `progress`.

    If updates are `recounted` from there on, only those of complete epochs do.
    """
    before = line.step < progress.step or (line.step == progress.step and not line.ends_epoch)
    return line.epoch < progress.epoch or (before and not recounted)


class MetricsFile:
    """`metrics.jsonl`, one JSON object per line.

    A file that is removed or replaced while it is written comes back with all its lines. `events` receives the same
    lines for TensorBoard. `notes` are lines for the user. Raises RunError if the file cannot be opened.
    """

    def __init__(self, path: Path, events: EventFile | None = None) -> None:
        self._path, self._events = path, events
        self._begun = path.exists()
        self._file = _appended(path)
        self.notes: list[str] = []

    def forget_after(self, progress: Progress, recounted: bool, beat: Callable[[], None] = lambda: None) -> None:
        """Remove the lines that a killed run wrote after the checkpoint, and lines that cannot be read.

        If updates are `recounted`, only lines of complete epochs are kept. `beat` is called from time to time. Raises
        RunError if the file cannot be read or written.
        """
        self._file.close()
        damaged = 0
        try:
            with atomic(self._path) as kept:
                for number, (text, line) in enumerate(scan_metrics(self._path)):
                    if line is None:
                        damaged += text.endswith(b"\n")  # else the run was killed while it wrote the last line
                    elif is_before(line, progress, recounted):
                        kept.write(text.rstrip(b"\n") + b"\n")
                    if number % 10_000 == 0:
                        beat()
        except OSError as error:
            raise RunError(
                f"{self._path}: cannot be read ({error.strerror}); remove it to train on without it"
            ) from error
        self._file = _appended(self._path)
        if damaged:
            self.notes.append(f"{self._path}: {damaged} damaged line(s) are left out")
        if progress.step and not self._begun:
            self.notes.append(f"{self._path}: it was missing; there are no lines of the steps up to {progress.step}")
        if self._events:
            self._events.begin(read_metrics(self._path))

    def write(self, line: MetricLine) -> None:
        """Append one line and flush it. Raises RunError if the disk is full."""
        self.keep()
        try:
            self._file.write(line.model_dump_json(exclude_none=True).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise unwritable(self._path, error, "and start again") from error
        if self._events:
            self._events.write([line])

    def keep(self) -> None:
        """Make the file again where it, or its folder, was removed or replaced. Raises RunError if that fails."""
        if _is_open(self._file, self._path):
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with atomic(self._path) as again:
                self._file.seek(0)
                shutil.copyfileobj(self._file, again)
        except OSError as error:
            raise unwritable(self._path, error, "and start again") from error
        self._file.close()
        self._file = _appended(self._path)
        print(
            f"warning: {self._path}: removed or replaced while the run writes it; made again, with all lines",
            flush=True,
        )


def _is_open(file: BinaryIO, path: Path) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def _appended(path: Path) -> BinaryIO:
    try:  # without blocking: the file in the folder of a resumed run may be a FIFO
        return open(path, "a+b", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o644))
    except OSError as error:
        raise unwritable(path, error, "and start again") from error
