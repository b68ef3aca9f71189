"""What `--overwrite` replaces: set aside until the new run has trained, and put back if it never does.

`.replaced` has all of an earlier run. `.replacing` has a part of it, while the rest is still or again in the folder: a
command that was killed while it moved files leaves that, and every name in it belongs to the folder.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdkit.errors import RequestError

_WHOLE, _PART = NAMES = (".replaced", ".replacing")
_LOOK_S = 0.5
# The documents that commands end with. With a checkpoint they are what shows that the new run is worth the earlier one.
DOCUMENTS = {
    "result.json", "evaluate.json", "predict-images.json", "generate.json", "doctor.json", "diff.json", "compare.json",
    "parity.json", "sweep.json", "predict.json", "advise.json", "bench.json", "profile.json", "links.json",
    "pipeline.json", "launch.json",
}  # fmt: skip
_ASIDE = {*NAMES, "tuning", "trace", "logs", "debug", "tensorboard", "tracking"}

Ours = Callable[[Path], list[Path]]  # what hvdkit's commands have written into a folder


def left(folder: Path) -> bool:
    """Whether a command that was killed has left something set aside."""
    return any(os.path.lexists(folder / name) for name in NAMES)


def settle(folder: Path, ours: Ours) -> bool:
    """As `given_back`, for what a killed command has left. Raises RequestError if files cannot be moved."""
    try:
        return given_back(folder, ours)
    except OSError as error:
        raise RequestError(
            f"{error.filename}: cannot be put back ({error.strerror}); it is of a run that --overwrite had set aside "
            f"in {folder / _WHOLE}"
        ) from error


def set_aside(named: Path, folder: Path, paths: Iterable[Path]) -> bool:
    """Move what an earlier run left out of the way; whether there was something. Raises RequestError if it cannot."""
    aside, paths = folder / _PART, list(paths)
    if not paths:
        return False
    try:
        aside.mkdir()
        for path in paths:
            path.rename(aside / path.name)
        aside.rename(folder / _WHOLE)
    except OSError as error:
        with suppress(OSError):
            _move_back(folder)
        raise RequestError(
            f"--out {named}: {error.filename} cannot be removed ({error.strerror}); choose another folder"
        ) from error
    return True


def trained(folder: Path) -> bool:
    """Whether the run that writes into the folder has a checkpoint or a result."""
    for path, folders, names in os.walk(folder):
        if not DOCUMENTS.isdisjoint(names):
            return True
        if os.path.basename(path) == "checkpoints":  # noqa: PTH119 - a walk of many folders, twice a second
            if any(name.startswith("step-") for name in folders):
                return True
            folders.clear()
        folders[:] = [name for name in folders if name not in _ASIDE]
    return False


@contextmanager
def deleted_once_trained(folder: Path) -> Iterator[None]:
    """Delete what is set aside as soon as the block has trained, so that the disk does not hold both to the end."""
    if not os.path.lexists(folder / _WHOLE):
        yield
        return
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(_LOOK_S):
            if trained(folder):
                delete(folder)
                return

    looking = threading.Thread(target=look, name="replaced", daemon=True)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()


def given_back(folder: Path, ours: Ours) -> bool:
    """Put back what is set aside, in place of what the new run has written, unless that has trained; whether it did.

    The folder's lock must be held. Raises OSError if files cannot be moved.
    """
    if not left(folder):
        return False
    if trained(folder) and not os.path.lexists(folder / _PART):
        delete(folder)
        return False
    if os.path.lexists(folder / _WHOLE):
        remove(ours(folder))
        (folder / _WHOLE).rename(folder / _PART)  # from here on every name in it belongs to the folder
    _move_back(folder)
    return True


def delete(folder: Path) -> None:
    """Delete what is set aside."""
    shutil.rmtree(folder / _WHOLE, ignore_errors=True)


def remove(paths: Iterable[Path]) -> None:
    """Delete files and folders."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _move_back(folder: Path) -> None:
    aside = folder / _PART
    for path in list(aside.iterdir()):
        path.rename(folder / path.name)
    aside.rmdir()
