"""Writing checkpoints on rank 0 while training continues, and keeping the newest few and the best (`snapshots.py`)."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import numpy as np

from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.snapshots import (
    BEST,
    LAST,
    RECORD,
    CheckpointRecord,
    is_whole,
    link,
    name_of,
    progress_of,
)
from hvdkit.checkpoint.streamed import Layout, SafetensorsFile
from hvdkit.errors import RunError
from hvdkit.files import advice, open_regular, write_atomic
from hvdkit.heartbeat import Heartbeat, say
from hvdkit.recipe.schema import Checkpointing


class Checkpoints:
    """A run's folder of checkpoints, used on rank 0. It keeps the newest few and the best one.

    `metric` is the task's (`tasks.task.Task.best`). What cannot be written is said at once and does not end training;
    `missing` has the line until a later checkpoint is written. A wait for the disk is reported to `heartbeat`.
    """

    def __init__(self, folder: Path, settings: Checkpointing, metric: str, heartbeat: Heartbeat | None = None) -> None:
        self._folder, self._settings, self._metric = folder, settings, metric
        self._heartbeat = heartbeat or Heartbeat()
        with suppress(OSError):  # whose cause is said when a checkpoint is written
            for left in folder.glob(".step-*.making"):  # left by a killed run
                shutil.rmtree(left, ignore_errors=True)
        self._writing: threading.Thread | None = None
        self._began, self._what = 0.0, ""
        self._fault: Exception | None = None  # not the disk's
        self.missing: str | None = None
        self._full = False  # whether it is missing for lack of space
        self._whole: dict[Path, bool] = {}  # whether a checkpoint can be read: by what has been written, or by digests

    def write(self, record: CheckpointRecord, layout: Layout, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        """Start writing a state's tensors in a thread; training may continue, and the caller may change the arrays.

        The work that takes CPU time is done in this call, which is not timed as a step; the thread waits for the disk.
        Until then the files are in memory, and nothing else is. Waits until the previous checkpoint is written, and
        raises what `wait` does.
        """
        self.wait()
        contents = {name: BytesIO() for name in snapshots.parts_of(layout)}
        _put(contents, layout, tensors)
        files = {name: content.getbuffer() for name, content in contents.items()}
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        self._start(record, lambda: self._write(record, files, digests))

    def write_each(self, record: CheckpointRecord, layout: Layout, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
        """As `write`, but to the disk in this call, so that the state is not in memory.

        Takes all tensors even if they cannot be written, as other ranks wait for that.
        """
        self.wait()
        making, what = None, _what(record)
        try:
            making = self._begin(record)
            with ExitStack() as opened:
                parts = snapshots.parts_of(layout)
                files = {name: opened.enter_context((making / name).open("wb")) for name in parts}
                _put(files, layout, tensors, lambda *put: self._heartbeat.on_disk(what, *put))
        except OSError as error:
            for _ in tensors:
                pass
            if making is not None:
                shutil.rmtree(making, ignore_errors=True)
            self._note_missing(record, error)
            return
        names = list(files)
        self._start(record, lambda: self._end(record, making, {name: _flushed(making / name) for name in names}))

    def wait(self) -> None:
        """Wait until all is written, or cannot be. Raises an exception of the thread that is not the disk's."""
        if self._writing is not None:
            self._heartbeat.await_disk(self._writing, self._what, self._began)
            self._writing = None
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    def make_room(self) -> None:
        """Delete, if the disk is full, the checkpoints that would be deleted after the next one is written.

        One that can be read stays, and the best.
        """
        if not self._full:
            return
        places, links = snapshots.places(self._folder), self.kept()
        whole = [place for place in places if self._is_whole(place)]
        for place in whole[: -max(1, self._settings.keep - 1)]:
            if place not in links.values():
                say(f"{place}: removed to make room for the last checkpoint")
                shutil.rmtree(place, ignore_errors=True)

    def kept(self) -> dict[str, Path]:
        """The folders that `last` and, if there is a validation split, `best` point to; complete after `wait`."""
        links = {name: self._folder / name for name in (LAST, BEST)}
        return {name: self._folder / link.readlink() for name, link in links.items() if link.is_symlink()}

    def _start(self, record: CheckpointRecord, writes: Callable[[], None]) -> None:
        self._began, self._what = time.monotonic(), _what(record)
        self._writing = threading.Thread(target=self._keep_error, args=(record, writes), name="checkpoint")
        self._writing.start()

    def _keep_error(self, record: CheckpointRecord, writes: Callable[[], None]) -> None:
        try:
            writes()
        except OSError as error:
            self._note_missing(record, error)
        except RunError as error:  # of `write_atomic`
            cause = error.__cause__
            self._note_missing(record, cause if isinstance(cause, OSError) else OSError(None, str(error)))
        except Exception as error:  # `wait` raises it; an exception in a thread is not raised elsewhere
            self._fault = error
        else:
            if self.missing is not None:
                say(f"{_what(record)} is written: {self._folder / name_of(record)}")
            self.missing = None

    def _note_missing(self, record: CheckpointRecord, error: OSError) -> None:
        why = error.strerror or str(error) or type(error).__name__
        left, again, before = "there is none", "start again", self.missing
        with suppress(OSError):
            if (newest := self.kept().get(LAST)) and newest.is_dir():
                left, again = f"the newest one is {newest.name}", "use --resume"
        fault = f"{self._folder}: {_what(record)} cannot be written ({why}); {left}; {advice(error)}"
        self.missing, self._full = f"{fault}, then {again}", error.errno in (errno.ENOSPC, errno.EDQUOT)
        if self.missing != before:  # the last one is tried several times
            say(f"{fault}: training continues, and one is tried again when the next is due, and at the end")

    def _write(self, record: CheckpointRecord, files: Mapping[str, memoryview], digests: dict[str, str]) -> None:
        making = self._begin(record)
        try:
            for name, content in files.items():
                (making / name).write_bytes(content)
                _sync(making / name)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        self._end(record, making, digests)

    def _begin(self, record: CheckpointRecord) -> Path:
        """A new folder, which `_end` renames."""
        if any(self._whole.values()) and not self._folder.exists():
            say(f"{self._folder}: the folder has been removed, with the checkpoints in it; it is made anew")
            self._whole.clear()
        self._folder.mkdir(parents=True, exist_ok=True)
        making = self._folder / f".{name_of(record)}.making"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        return making

    def _end(self, record: CheckpointRecord, making: Path, digests: dict[str, str]) -> None:
        """Make a checkpoint of a folder whose tensors are on the disk."""
        place = self._folder / name_of(record)
        try:
            write_atomic(making / RECORD, record.model_copy(update={"files": digests}).sealed())
            _sync(making)
            if place.exists():  # the same checkpoint, of a run that was killed after this step
                shutil.rmtree(place)
            making.rename(place)
            _sync(self._folder)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        self._whole[place] = True
        self._prune(place)

    def _prune(self, written: Path) -> None:
        """Update the links `last` and `best`, and delete all but the newest few and the best.

        Checkpoints that cannot be read count for nothing, and are deleted once there are enough others. One that this
        object has not written is read for that, once.
        """
        places = snapshots.places(self._folder)
        self._whole = {place: self._whole[place] for place in places if place in self._whole}
        newest = [place for place in reversed(places) if place != written]
        kept = [written]
        while newest and len(kept) < self._settings.keep:
            if self._is_whole(place := newest.pop(0)):
                kept.append(place)
        kept.sort(key=places.index)
        link(self._folder, LAST, kept[-1])  # before deleting: no link ever points to a deleted folder
        scored = {place: score for place in places if (score := self._score(place)) is not None}
        ranked = sorted(scored, key=lambda place: (scored[place], place.name), reverse=True)
        best = next((place for place in ranked if self._is_whole(place)), None)
        if best is not None:
            link(self._folder, BEST, best)
        if len(kept) < self._settings.keep:
            return
        for place in places:
            if place not in kept and place != best:
                try:
                    shutil.rmtree(place)
                except OSError as error:
                    say(f"{place}: this old checkpoint cannot be removed ({error.strerror})")

    def _is_whole(self, place: Path) -> bool:
        if place not in self._whole:
            self._whole[place] = is_whole(place)
        return self._whole[place]

    def _score(self, place: Path) -> float | None:
        progress = progress_of(place)
        if progress is None or not progress.evaluated:
            return None
        score = progress.judged.get(self._metric.removeprefix("-"))
        return -score if score is not None and self._metric.startswith("-") else score


def _put(
    files: Mapping[str, BinaryIO],
    layout: Layout,
    tensors: Iterable[tuple[str, np.ndarray]],
    call: Callable[..., object] = lambda put, *given: put(*given),
) -> None:
    """Write the tensors into their files, each by a `call`."""
    packed = {name: SafetensorsFile(files[name], part) for name, part in snapshots.parts_of(layout).items()}
    for name, array in tensors:
        file, own_name = snapshots.file_of(name)
        call(packed[file].put, own_name, array)
    for content in packed.values():
        content.end()


def _what(record: CheckpointRecord) -> str:
    return f"the checkpoint of step {record.progress.step}"


def _flushed(path: Path) -> str:
    """The SHA-256 of a file, which is then on the disk."""
    _sync(path)
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file, or a folder's entries, to the disk; otherwise a power failure may lose a rename."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
