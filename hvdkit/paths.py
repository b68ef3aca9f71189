"""Where the recipes are, and folders that a command may write into."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hvdkit
from hvdkit.errors import RequestError

# All that hvdkit's commands leave in a folder. `--overwrite` takes these away and nothing else, whatever --out says.
_OURS = {
    "config.yaml", "metrics.jsonl", "result.json", "logs",
    "compare.json", "compare.md", "runs",
    "parity.json", "parity.md", "parity.png", "parity", "trace",
}  # fmt: skip
_LOCK = ".lock"


def recipes() -> Path:
    """The folder of the recipes and their scripts: inside an installed package, beside it in a checkout."""
    package = Path(hvdkit.__file__).resolve().parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def script(framework: str) -> Path:
    """The recipe script of one framework."""
    return recipes() / framework / "resnet.py"


def default_out(recipe: str, command: str) -> Path:
    """`runs/<recipe>-<command>-<time>`."""
    return Path("runs") / f"{recipe}-{command}-{time.strftime('%Y%m%d-%H%M%S')}"


def check_free(folder: Path, overwrite: bool) -> None:
    """Check that a command may write into `folder`, without touching it.

    Raises RequestError where it is no folder, cannot be written, holds something and `overwrite` is not given, or
    holds what hvdkit has not written.
    """
    existing = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
    if not existing.is_dir():
        raise RequestError(f"--out {folder}: {existing} is a file; expected a folder or a new name")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise RequestError(f"--out {folder}: {existing} cannot be written (permission denied); choose another folder")
    if not folder.is_dir():
        return
    content = {path.name for path in folder.iterdir()} - {_LOCK}
    if content and not overwrite:
        raise RequestError(f"--out {folder}: the folder is not empty; add --overwrite or choose another one")
    foreign = sorted(content - _OURS)
    if foreign:
        raise RequestError(
            f"--out {folder}: it holds {foreign[0]!r}, which hvdkit has not written; choose another folder"
        )


@contextmanager
def claimed(folder: Path, overwrite: bool) -> Iterator[Path]:
    """`folder`, empty and this process's alone; yields its absolute path.

    Raises RequestError as `check_free` does, and where another run is writing there.
    """
    check_free(folder, overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("w")
    except OSError as error:
        raise RequestError(f"--out {folder}: cannot be written ({error.strerror}); choose another folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"--out {folder}: another run is writing there; choose another folder") from None
        for name in _OURS:
            path = folder / name
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        try:
            yield folder.absolute()
        finally:
            (folder / _LOCK).unlink(missing_ok=True)
