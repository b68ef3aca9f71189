"""Checkpoints: a folder of safetensors and JSON, the same for every framework.

    checkpoints/step-00000440/model.safetensors       parameters and running statistics, torchvision's names and layouts
                              optimizer.safetensors   slots and counts, as in `Session.state`
                              average.safetensors     averaged parameters and statistics, if there are any
                              communication.safetensors   the state of compression and Local SGD, if there is any
                              checkpoint.json         the progress of training, a digest of each file, and its own
    checkpoints/last -> step-00000440                 the newest
    checkpoints/best -> step-00000440                 the best by the task's validation metric

A checkpoint is written to a temporary folder and renamed (`checkpoint/writing.py`), so it is either complete or absent.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load_file

from hvdkit.core.state import AVERAGE, averaged_state, has_average, is_averaged, model_state, slot_name
from hvdkit.core.step_plan import Progress
from hvdkit.data.dataset import Fingerprint, Preprocessing
from hvdkit.errors import RequestError, first_fault
from hvdkit.files import open_regular, read_bounded

FORMAT = 2
MODEL, OPTIMIZER, RECORD = "model.safetensors", "optimizer.safetensors", "checkpoint.json"
COMMUNICATION, AVERAGED = "communication.safetensors", "average.safetensors"
LAST, BEST = "last", "best"
# Of the keys of validation metrics, by the field of `Progress`.
_PREFIXES = {"validation": "val_", "average_validation": "average_val_"}
# How a record ends: with the SHA-256 of all bytes before this.
_SEAL = re.compile(rb',\n "sha256": "([0-9a-f]{64})"\n}\n\Z')
_END = "\n}"
State = dict[str, np.ndarray]
T = TypeVar("T")


def _from_file(progress: Any) -> Any:
    """The fields of a `Progress` from a file's keys: `images` counts samples, and `val_accuracy` is a metric."""
    if not isinstance(progress, dict):
        return progress
    fields = {key: value for key, value in progress.items() if not key.startswith(tuple(_PREFIXES.values()))}
    fields["samples"] = fields.pop("images", fields.get("samples", 0))
    for field, prefix in _PREFIXES.items():
        metrics = {key: value for key, value in progress.items() if key.startswith(prefix) and value is not None}
        fields[field] = {key.removeprefix(prefix): value for key, value in metrics.items()}
    return fields


def _to_file(progress: Progress) -> dict[str, Any]:
    fields = asdict(progress)
    fields["images"] = fields.pop("samples")
    for field, prefix in _PREFIXES.items():
        fields |= {f"{prefix}{name}": value for name, value in fields.pop(field).items()}
    if not progress.watched:  # without early stopping, files are those of earlier versions
        fields = {key: value for key, value in fields.items() if key not in ("watched", "best", "best_epoch")}
    return fields


class CheckpointRecord(BaseModel):
    """`checkpoint.json`: the progress of training, the versions that wrote it, and digests of the other files.

    `np` is the number of ranks, `recipe` the resolved recipe; `files` maps a file's name to its SHA-256.
    `preprocessing` says how a picture becomes the model's input, and names the classes, where the data are pictures.
    `text_sha256` is that of the whole text, where the data are a text, `script_sha256` that of the file of
    `model.script`. `data` has the fingerprints of `train` and `val`.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True)

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

    def sealed(self) -> str:
        """The text of the file, with its own SHA-256 at the end."""
        return sealed(self.model_dump_json(indent=1))


def sealed(document: str) -> str:
    """A record as JSON with its SHA-256 at the end."""
    text = document.removesuffix(_END)
    return f'{text},\n "sha256": "{hashlib.sha256(text.encode()).hexdigest()}"{_END}\n'


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in memory: its record, and the state as `Session.load_state` takes it."""

    record: CheckpointRecord
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
    for name in (BEST, LAST):
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
    fault = (
        "no such folder" if not there else "neither a run nor a checkpoint is in it" if path.is_dir() else "is a file"
    )
    runs = sorted(Path("runs").glob(f"*/checkpoints/{LAST}"), key=lambda run: run.lstat().st_mtime)
    here = f"; the newest run here is {runs[-1].parent.parent}" if runs else ""
    return (
        f"{path}: {fault}; expected a run's folder, such as runs/photos, or a checkpoint's, such as "
        f"runs/photos/checkpoints/best{here}"
    )


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint. Raises RequestError, naming the file, if one is missing, truncated, damaged or foreign."""
    record, state = read_record(folder), State()
    for name, expected in record.files.items():
        check_digest(folder / name, expected)
        tensors = _read_tensors(folder / name)
        state |= {slot_name(AVERAGE, tensor): tensors[tensor] for tensor in tensors} if name == AVERAGED else tensors
    return Checkpoint(record, state)


def is_whole(folder: Path) -> bool:
    """Whether `read` would read this checkpoint. Its files are read once, and not kept in memory."""
    try:
        for name, expected in read_record(folder).files.items():
            check_digest(folder / name, expected)
    except RequestError:
        return False
    return True


def read_record(folder: Path) -> CheckpointRecord:
    """Read and check `checkpoint.json` alone. Raises RequestError, naming the file, as `read` does."""
    path = folder / RECORD
    try:
        content = read_bounded(path)
    except OSError as error:
        if not os.path.lexists(path) and not os.path.lexists(folder / MODEL):
            raise RequestError(_none(folder)) from None
        raise RequestError(
            f"{path}: cannot be read ({error.strerror}); expected a run's folder, or a checkpoint's such as "
            "RUN/checkpoints/best"
        ) from None
    seal = _SEAL.search(content)
    if seal is None:
        raise RequestError(f"{path}: damaged, or no checkpoint of hvdkit: it does not end with its SHA-256")
    _compare(path, hashlib.sha256(content[: seal.start()]).hexdigest(), seal[1].decode(), "its end")
    try:
        record = CheckpointRecord.model_validate_json(content[: seal.start()] + _END.encode(), strict=True)
    except ValidationError as error:
        raise RequestError(f"{path}: not a checkpoint of hvdkit: {first_fault(error)}") from None
    if record.format != FORMAT:
        raise RequestError(f"{path}: format: expected {FORMAT}, got {record.format}; it was written by another hvdkit")
    if set(record.files) - {COMMUNICATION, AVERAGED} != {MODEL, OPTIMIZER}:
        raise RequestError(f"{path}: files: expected {MODEL} and {OPTIMIZER}, got {', '.join(record.files) or 'none'}")
    return record


def check_digest(path: Path, expected: str) -> None:
    """Check a file by its SHA-256. Raises RequestError if it is another one, or the file cannot be read."""
    try:
        with open_regular(path) as file:
            got = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); use another checkpoint") from None
    _compare(path, got, expected, RECORD)


def _compare(path: Path, got: str, expected: str, where: str) -> None:
    if got != expected:
        raise RequestError(
            f"{path}: damaged: its SHA-256 is {got[:12]}…, {where} says {expected[:12]}…; use another checkpoint"
        )


def _read_tensors(path: Path) -> State:
    try:
        return load_file(path)
    except OSError as error:
        raise RequestError(f"{path}: cannot be read ({error.strerror}); use another checkpoint") from None
    except (SafetensorError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise RequestError(f"{path}: no safetensors file ({error}); use another checkpoint") from None


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest valid checkpoint in `folder`, and one line for each later one that is not valid."""
    complaints: list[str] = []
    for place in reversed(places(folder)):
        try:
            checkpoint = read(place)
            if place.name != (name := name_of(checkpoint.record)):
                raise RequestError(f"{place}: expected the name {name}, as {RECORD} says; rename it, or use another")
            return checkpoint, complaints
        except RequestError as error:
            complaints.append(str(error))
    return None, complaints


def places(folder: Path) -> list[Path]:
    """All checkpoints sorted by progress, the earliest first; unreadable ones come last.

    The order is not that of the names, because updates are recounted with another number of ranks.
    """
    return sorted((place for place in folder.glob("step-*") if place.is_dir()), key=_position)


def _position(place: Path) -> tuple[int, int, int, str]:
    progress = progress_of(place)
    return (1, 0, 0, place.name) if progress is None else (0, *progress.position, place.name)


def progress_of(place: Path) -> Progress | None:
    """The progress in a checkpoint; None if it cannot be read."""
    try:
        return read_record(place).progress
    except RequestError:
        return None


def name_of(record: CheckpointRecord) -> str:
    """The name of the checkpoint's folder."""
    return f"step-{record.progress.step:08}"


def link(folder: Path, name: str, place: Path) -> None:
    """Have `last` or `best` in `folder` point to a checkpoint there. Raises OSError."""
    new = folder / f".{name}"
    new.unlink(missing_ok=True)
    new.symlink_to(place.name)
    new.replace(folder / name)


def file_of(name: str) -> tuple[str, str]:
    """The file that a tensor of a state is in, and its name there."""
    if is_averaged(name):  # it can be used as a model's file
        return AVERAGED, name.removeprefix(slot_name(AVERAGE, ""))
    return {"optimizer": OPTIMIZER, "communication": COMMUNICATION}.get(name.partition(".")[0], MODEL), name


def parts_of(state: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """What a state has by name, by the file that it is in."""
    parts: dict[str, dict[str, T]] = {MODEL: {}, OPTIMIZER: {}, COMMUNICATION: {}, AVERAGED: {}}
    for name, value in state.items():
        file, own_name = file_of(name)
        parts[file][own_name] = value
    return {file: part for file, part in parts.items() if part or file in (MODEL, OPTIMIZER)}
