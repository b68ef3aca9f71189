"""Checkpoints: a folder of safetensors and JSON, the same for every framework.

    checkpoints/step-00000440/model.safetensors       parameters and running statistics, torchvision's names and layouts
                              optimizer.safetensors   slots and counts, as in `Session.state`
                              average.safetensors     averaged parameters and statistics, if there are any
                              communication.safetensors   the state of compression and Local SGD, if there is any
                              checkpoint.json         the progress of training, and a digest of each file
    checkpoints/last -> step-00000440                 the newest
    checkpoints/best -> step-00000440                 the best by the task's validation metric

A checkpoint is written to a temporary folder and renamed, so it is either complete or absent.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from hvdkit.core.state import AVERAGE, averaged_state, has_average, is_averaged, model_state, slot_name
from hvdkit.core.step_plan import Progress
from hvdkit.data.dataset import Fingerprint, Preprocessing
from hvdkit.errors import RequestError, RunError, first_fault
from hvdkit.files import open_regular, read_bounded, write_atomic
from hvdkit.recipe.schema import Checkpointing

if TYPE_CHECKING:
    from hvdkit.checkpoint.streamed import Layout

FORMAT = 1
MODEL, OPTIMIZER, RECORD = "model.safetensors", "optimizer.safetensors", "checkpoint.json"
COMMUNICATION, AVERAGED = "communication.safetensors", "average.safetensors"
LAST, _BEST = "last", "best"
# Of the keys of validation metrics, by the field of `Progress`.
_PREFIXES = {"validation": "val_", "average_validation": "average_val_"}
State = dict[str, np.ndarray]
T = TypeVar("T")


def _from_file(progress: Any) -> Any:
    """The fields of a `Progress` from a file's keys: `images` counts samples, and `val_accuracy` is a metric."""
    if not isinstance(progress, dict):
        return progress
    fields = {key: value for key, value in progress.items() if not key.startswith(tuple(_PREFIXES.values()))}
    fields["samples"] = fields.pop("images", fields.get("samples", 0))
    for field, prefix in _PREFIXES.items():
        found = {key: value for key, value in progress.items() if key.startswith(prefix) and value is not None}
        fields[field] = {key.removeprefix(prefix): value for key, value in found.items()}
    return fields


def _to_file(progress: Progress) -> dict[str, Any]:
    fields = asdict(progress)
    fields["images"] = fields.pop("samples")
    for field, prefix in _PREFIXES.items():
        fields |= {f"{prefix}{name}": value for name, value in fields.pop(field).items()}
    if not progress.watched:  # without early stopping, files are those of earlier versions
        fields = {key: value for key, value in fields.items() if key not in ("watched", "best", "best_epoch")}
    return fields


class Record(BaseModel):
    """`checkpoint.json`: the progress of training, the versions that wrote it, and digests of the other files.

    `np` is the number of ranks, `recipe` the resolved recipe; `files` maps a file's name to its SHA-256.
    `preprocessing` says how a picture becomes the model's input, and names the classes, where the data are pictures.
    `text_sha256` is that of the whole text, where the data are a text, `script_sha256` that of the file of
    `model.script`. `data` has the fingerprints of `train` and `val`.
    """

    model_config = ConfigDict(extra="forbid")

    format: int = FORMAT
    progress: Annotated[Progress, BeforeValidator(_from_file), PlainSerializer(_to_file)]
    np: int
    framework: str
    framework_version: str
    hvdkit_version: str
    recipe: dict[str, Any]
    files: dict[str, str] = {}
    preprocessing: Preprocessing | None = None
    text_sha256: str | None = None
    data: dict[str, Fingerprint] | None = None
    script_sha256: str | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: its record, and the state as `Session.load_state` takes it."""

    record: Record
    state: State

    def model(self, average: bool = True) -> tuple[State, bool]:
        """Parameters and buffers: of the averaged weights, unless `average` is False or there are none. Which of both
        they are is the second value."""
        averaged = average and has_average(self.state)
        return averaged_state(self.state) if averaged else model_state(self.state), averaged


def locate(path: Path) -> Path:
    """The checkpoint's folder that `path` means: itself or, of a run's folder, the best checkpoint, else the last one.

    A path that is neither is returned as it is, for `read` to report. Raises RequestError for a run that kept none.
    """
    try:
        path.lstat()
    except OSError:  # there is none, or the system refuses to look at it
        return path
    if (path / RECORD).exists():
        return path
    for name in (_BEST, LAST):
        if (path / "checkpoints" / name).is_dir():
            return path / "checkpoints" / name
    if (path / "checkpoints").is_dir() or (path / "config.yaml").exists():
        raise RequestError(
            f"{path}: this run has kept no checkpoint; it may have ended before its first one, or its config.yaml says "
            "checkpoint: null; train again with checkpoint={}"
        )
    return path


def _none(path: Path) -> str:
    """The message for a path at which there is neither a run nor a checkpoint."""
    there = os.path.lexists(path)  # raises nothing, even for a name that is too long
    found = (
        "no such folder" if not there else "neither a run nor a checkpoint is in it" if path.is_dir() else "is a file"
    )
    runs = sorted(Path("runs").glob(f"*/checkpoints/{LAST}"), key=lambda each: each.lstat().st_mtime)
    here = f"; the newest run here is {runs[-1].parent.parent}" if runs else ""
    return (
        f"{path}: {found}; expected a run's folder, such as runs/photos, or a checkpoint's, such as "
        f"runs/photos/checkpoints/best{here}"
    )


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint. Raises RequestError, naming the file, if one is missing, truncated, damaged or foreign."""
    path = folder / RECORD
    try:
        record = Record.model_validate_json(read_bounded(path))
    except OSError as error:
        if not os.path.lexists(path) and not os.path.lexists(folder / MODEL):
            raise RequestError(_none(folder)) from None
        raise RequestError(
            f"{path}: cannot be read ({error.strerror}); expected a run's folder, or a checkpoint's such as "
            "RUN/checkpoints/best"
        ) from None
    except ValidationError as error:
        raise RequestError(f"{path}: not a checkpoint of hvdkit: {first_fault(error)}") from None
    if min(record.progress.step, record.progress.epoch, record.progress.samples) < 0:
        raise RequestError(f"{path}: not a checkpoint of hvdkit: progress: expected no negative counts")
    if set(record.files) - {COMMUNICATION, AVERAGED} != {MODEL, OPTIMIZER}:
        raise RequestError(f"{path}: files: expected {MODEL} and {OPTIMIZER}, got {', '.join(record.files) or 'none'}")
    if record.format != FORMAT:
        raise RequestError(f"{path}: format: expected {FORMAT}, got {record.format}; it was written by another hvdkit")
    state: State = {}
    for name, expected in record.files.items():
        tensors = _read_tensors(folder / name, expected)
        state |= {slot_name(AVERAGE, each): tensors[each] for each in tensors} if name == AVERAGED else tensors
    return Checkpoint(record, state)


def _read_tensors(path: Path, expected: str) -> State:
    try:
        with open_regular(path) as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != expected:
            raise RequestError(
                f"{path}: damaged: its SHA-256 is {found[:12]}…, {RECORD} says {expected[:12]}…; use another checkpoint"
            )
        return load_file(path)
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); use another checkpoint") from None
    except SafetensorError as error:
        raise RequestError(f"{path}: no safetensors file ({error}); use another checkpoint") from None


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint in `folder`, and one line for each later one that is not valid."""
    complaints: list[str] = []
    for place in reversed(_places(folder)):
        try:
            return read(place), complaints
        except RequestError as error:
            complaints.append(str(error))
    return None, complaints


class Checkpoints:
    """A run's folder of checkpoints, used on rank 0. It keeps the newest few and the best one.

    `metric` is the task's (`tasks.task.Task.best`).
    """

    def __init__(self, folder: Path, settings: Checkpointing, metric: str) -> None:
        self._folder, self._settings, self._metric = folder, settings, metric
        for left in folder.glob(".step-*.making"):  # left by a killed run
            shutil.rmtree(left, ignore_errors=True)
        self._writing: threading.Thread | None = None
        self._fault: Exception | None = None

    def write(self, checkpoint: Checkpoint) -> None:
        """Start writing in a thread; training may continue, and the caller may change the arrays.

        The work that takes CPU time is done in this call, which is not timed as a step; the thread waits for the disk.
        Raises RunError if the previous checkpoint could not be written; older checkpoints stay as they are.
        """
        self.wait()
        state = {name: np.asarray(array, order="C") for name, array in checkpoint.state.items()}
        files = {name: save(part) for name, part in _parts(state).items()}
        digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
        self._start(lambda: self._write(checkpoint.record, files, digests))

    def write_each(self, record: Record, layout: Layout, tensors: Iterator[tuple[str, np.ndarray]]) -> None:
        """As `write`, of a state's tensors that come one after the other, so that they are not in memory together.

        Takes all of them even if they cannot be written, as other ranks wait for that.
        """
        from hvdkit.checkpoint.streamed import SafetensorsFile  # one rank does not need it

        self.wait()
        making = None
        try:
            making = self._begin(record)
            with ExitStack() as opened:
                files = {
                    name: opened.enter_context(SafetensorsFile(making / name, part))
                    for name, part in _parts(layout).items()
                }
                for name, array in tensors:
                    file, own_name = _file_of(name)
                    files[file].put(own_name, array)
        except OSError as error:
            for _ in tensors:
                pass
            if making is not None:
                shutil.rmtree(making, ignore_errors=True)
            self._fault = self._full(error)
            return
        names = list(files)
        self._start(lambda: self._end(record, making, {name: _flushed(making / name) for name in names}))

    def wait(self) -> None:
        """Wait until all is written. Raises RunError if that failed, and any other exception of the thread."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._fault is not None:
            fault, self._fault = self._fault, None
            raise fault

    def kept(self) -> dict[str, Path]:
        """The folders that `last` and, if there is a validation split, `best` point to; complete after `wait`."""
        links = {name: self._folder / name for name in (LAST, _BEST)}
        return {name: self._folder / link.readlink() for name, link in links.items() if link.is_symlink()}

    def _start(self, writes: Callable[[], None]) -> None:
        self._writing = threading.Thread(target=self._keep_error, args=(writes,), name="checkpoint")
        self._writing.start()

    def _keep_error(self, writes: Callable[[], None]) -> None:
        try:
            writes()
        except OSError as error:
            self._fault = self._full(error)
        except Exception as error:  # `wait` raises it; an exception in a thread is not raised elsewhere
            self._fault = error

    def _full(self, error: OSError) -> RunError:
        return RunError(
            f"{self._folder}: no checkpoint can be written ({error.strerror}); free space, then use --resume"
        )

    def _write(self, record: Record, files: Mapping[str, bytes], digests: dict[str, str]) -> None:
        making = self._begin(record)
        try:
            for name, content in files.items():
                (making / name).write_bytes(content)
                _sync(making / name)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        self._end(record, making, digests)

    def _begin(self, record: Record) -> Path:
        """A new folder, which `_end` renames."""
        self._folder.mkdir(parents=True, exist_ok=True)
        making = self._folder / f".{_name(record)}.making"
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        return making

    def _end(self, record: Record, making: Path, digests: dict[str, str]) -> None:
        """Make a checkpoint of a folder whose tensors are on the disk."""
        place = self._folder / _name(record)
        try:
            write_atomic(making / RECORD, record.model_copy(update={"files": digests}).model_dump_json(indent=1) + "\n")
            _sync(making)
            if place.exists():  # the same checkpoint, of a run that was killed after this step
                shutil.rmtree(place)
            making.rename(place)
            _sync(self._folder)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            raise
        self._prune()

    def _prune(self) -> None:
        """Delete all but the newest few and the best, and update the links `last` and `best`."""
        places = _places(self._folder)
        whole = [place for place in places if _progress(place) is not None]
        scored = {place: score for place in whole if (score := self._score(place)) is not None}
        best = max(scored, key=lambda place: (scored[place], place.name), default=None)
        self._link(LAST, whole[-1])  # before deleting: no link ever points to a deleted folder
        if best is not None:
            self._link(_BEST, best)
        for place in places[: -self._settings.keep]:
            if place != best:
                shutil.rmtree(place)

    def _score(self, place: Path) -> float | None:
        progress = _progress(place)
        if progress is None or not progress.evaluated:
            return None
        score = progress.judged.get(self._metric.removeprefix("-"))
        return -score if score is not None and self._metric.startswith("-") else score

    def _link(self, name: str, place: Path) -> None:
        link = self._folder / f".{name}"
        link.unlink(missing_ok=True)
        link.symlink_to(place.name)
        link.replace(self._folder / name)


def _places(folder: Path) -> list[Path]:
    """All checkpoints sorted by progress, the earliest first; unreadable ones come last.

    The order is not that of the names, because updates are recounted with another number of ranks.
    """
    return sorted((place for place in folder.glob("step-*") if place.is_dir()), key=_position)


def _position(place: Path) -> tuple[int, int, int, str]:
    progress = _progress(place)
    return (1, 0, 0, place.name) if progress is None else (0, *progress.position, place.name)


def _progress(place: Path) -> Progress | None:
    """The progress in a checkpoint; None if it cannot be read."""
    try:
        return Record.model_validate_json(read_bounded(place / RECORD)).progress
    except (OSError, ValidationError):
        return None


def _name(record: Record) -> str:
    return f"step-{record.progress.step:08}"


def _file_of(name: str) -> tuple[str, str]:
    """The file that a tensor of a state is in, and its name there."""
    if is_averaged(name):  # it can be used as a model's file
        return AVERAGED, name.removeprefix(slot_name(AVERAGE, ""))
    return {"optimizer": OPTIMIZER, "communication": COMMUNICATION}.get(name.partition(".")[0], MODEL), name


def _parts(state: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """What a state has by name, by the file that it is in."""
    parts: dict[str, dict[str, T]] = {MODEL: {}, OPTIMIZER: {}, COMMUNICATION: {}, AVERAGED: {}}
    for name, value in state.items():
        file, own_name = _file_of(name)
        parts[file][own_name] = value
    return {file: part for file, part in parts.items() if part or file in (MODEL, OPTIMIZER)}


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
