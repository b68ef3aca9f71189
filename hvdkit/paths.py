"""The folders of recipes, and the output folders of commands."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import hvdkit
from hvdkit import replaced
from hvdkit.errors import RequestError
from hvdkit.files import closed_to_writes
from hvdkit.folder_lock import NAME as _LOCK
from hvdkit.folder_lock import FolderLock

# All that hvdkit's commands write into a folder. `--overwrite` deletes these names and nothing else.
_OURS = {
    *replaced.DOCUMENTS, "config.yaml", "tuning", "metrics.jsonl", "metrics.csv", "logs", "checkpoints", "tensorboard",
    "tracking", "debug", "compare.csv", "compare.md", "runs", "parity.csv", "parity.md", "parity.png", "parity",
    "trace", "report.html", "report.md", "sweep.csv", "sweep.png", "predict.csv", "predict.png", "predict-trace.json",
    "advise.csv", "advise.md", "bench.csv", "cluster.yaml", "bench.png", "request.json", "rows.json", "ranks.json",
    "links.csv", "links.png", "profile.csv", "profile.png", "trace.json", "timeline.json", "record.json", "own-profile",
    "pipeline.png", "pipeline.svg",
}  # fmt: skip
# What a command or its ranks write before there is a result.
_PREPARED = {_LOCK, *replaced.NAMES, "config.yaml", "request.json", "logs", "debug", "tuning", "trace", "tensorboard",
             "timeline.json"}  # fmt: skip


def expanded(path: str | os.PathLike[str]) -> Path:
    """The path with `~` or `~user` replaced by the home folder: a shell leaves them as they are after `=`.

    Raises RequestError for a user that this machine does not know, unless there is a file of that name.
    """
    full = Path(os.path.expanduser(path))  # noqa: PTH111 - Path.expanduser raises for an unknown user
    if str(full).startswith("~") and not os.path.lexists(full):
        user = full.parts[0]
        raise RequestError(f"{path}: there is no user {user[1:]!r}; ./{path} is a path that begins with {user!r}")
    return full


def recipes() -> Path:
    """The folder of recipes and scripts: inside an installed package, next to it in a checkout."""
    package = Path(hvdkit.__file__).resolve().parent
    installed = package / "recipes"
    return installed if installed.is_dir() else package.parent / "recipes"


def script(framework: str, name: str = "resnet") -> Path:
    """The recipe script of one framework that builds the models of this name."""
    return recipes() / framework / f"{name}.py"


def program(name: str) -> Path:
    """A program of a rank in `hvdkit/worker/`."""
    return Path(hvdkit.__file__).resolve().parent / "worker" / f"{name}.py"


def default_out(recipe: str, command: str) -> Path:
    """`runs/<recipe>-<command>-<time>`, with the characters of the recipe's name that are safe in a folder's name.

    A further run in the same second gets a number after it.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe)[:100].lstrip(".-") or "unnamed"
    first = Path("runs") / f"{name}-{command}-{time.strftime('%Y%m%d-%H%M%S')}"
    further = (first.with_name(f"{first.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([first], further) if not os.path.lexists(folder))


def lies_in(path: Path, folder: Path) -> bool:
    """Whether `path` exists and is inside `folder`, with links resolved."""
    return os.path.lexists(path) and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def check_free(folder: Path, overwrite: bool, resume: bool = False, inputs: Iterable[Path | str | None] = ()) -> None:
    """Check that a command may write into `folder`, without changing it.

    Raises RequestError if both `overwrite` and `resume` are given; if it is not a folder, is not writable, is not empty
    without one of them, or has files of others; and if `overwrite` would delete one of the command's own `inputs`.
    """
    if overwrite and resume:
        raise RequestError("--overwrite, --resume: expected one of them, got both")
    if re.search(r"[\0-\x1f\x7f-\x9f]", str(folder)):
        raise RequestError(f"--out {str(folder)!r}: expected no line ends and other control characters in the name")
    try:
        existing = next(ancestor for ancestor in (folder, *folder.absolute().parents) if os.path.lexists(ancestor))
        if existing.is_symlink() and not existing.exists():
            raise RequestError(f"--out {folder}: {existing} is a link to nothing; make its target, or remove it")
        if not existing.is_dir():
            raise RequestError(f"--out {folder}: {existing} is a file; expected a folder or a new name")
        if reason := closed_to_writes(existing):
            raise RequestError(f"--out {folder}: {existing} cannot be written ({reason}); choose another folder")
        content = {path.name for path in folder.iterdir()} - {_LOCK} if folder.is_dir() else set()
    except OSError as error:
        raise RequestError(f"--out {folder}: cannot be read ({error.strerror}); choose another folder") from error
    if content and not overwrite and not resume:
        raise RequestError(f"--out {folder}: the folder is not empty; add --overwrite or choose another one")
    foreign = sorted(name for name in content - _OURS - set(replaced.NAMES) if not _unfinished(name))
    if foreign:
        raise RequestError(
            f"--out {folder}: it holds {foreign[0]!r}, which hvdkit has not written; choose another folder"
        )
    if overwrite:
        for path in inputs:
            if path is not None and lies_in(Path(path), folder):
                raise RequestError(f"--out {folder}: --overwrite would remove {path}; choose another folder")


@contextmanager
def claimed(
    folder: Path, overwrite: bool, resume: bool = False, inputs: Iterable[Path | str | None] = ()
) -> Iterator[Path]:
    """Lock `folder` for this process and, without `resume`, empty it; yields its absolute path.

    What `overwrite` replaces is put back if the block ends without a checkpoint or a result, whatever ends it, and
    deleted as soon as there is one. If the block raises RequestError before there are results, what the command wrote
    into an empty folder is removed. Folders that the command made and left empty are removed.

    Raises RequestError like `check_free`, and if another run is writing there.
    """
    check_free(folder, overwrite, resume, inputs)
    created = [ancestor for ancestor in (folder.absolute(), *folder.absolute().parents) if not ancestor.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--out {folder}: cannot be written ({error.strerror}); choose another folder") from error
    absolute, done = folder.absolute(), False
    try:
        with FolderLock(folder), _undone_if_nothing_comes(folder, absolute, resume):
            yield absolute
        done = True
    finally:
        for new in [] if done else created:
            with suppress(OSError):  # not empty
                new.rmdir()


@contextmanager
def _undone_if_nothing_comes(named: Path, folder: Path, resume: bool) -> Iterator[None]:
    """Set aside what is there, unless it is resumed; put it back if the block ends without results."""
    if replaced.settle(folder, ours):
        _say_back(named)
    for path in folder.iterdir():
        if _unfinished(path.name) and path.is_file():  # of a command that was killed while it wrote
            path.unlink()
    fresh = not resume or not ours(folder)
    set_aside = False if resume else replaced.set_aside(named, folder, ours(folder))
    try:
        with replaced.deleted_once_trained(folder):
            yield
    except BaseException as error:
        with suppress(OSError):  # what ended the block matters more; the next command tries again
            if replaced.given_back(folder, ours):
                _say_back(named)
            elif isinstance(error, RequestError) and fresh and not set_aside and not _results(folder):
                replaced.remove(ours(folder))
        raise
    replaced.delete(folder)


def settled(folder: Path) -> Path:
    """The folder, for reading: earlier results that a killed `--overwrite` had set aside are put back before.

    Nothing happens while a run is writing there, and where this process may not write.
    """
    if replaced.left(folder):
        with suppress(RequestError), FolderLock(folder):
            if replaced.settle(folder.absolute(), ours):
                _say_back(folder)
    return folder


def _say_back(folder: Path) -> None:
    line = f"{folder}: the run with --overwrite has left no checkpoint and no result; the earlier files are back"
    print(line, file=sys.stderr, flush=True)


def ours(folder: Path) -> list[Path]:
    """What hvdkit's commands have written into the folder."""
    return [path for path in folder.iterdir() if path.name in _OURS or _unfinished(path.name)]


def _unfinished(name: str) -> bool:
    """Whether it is a temporary file that a killed command left (files.write_atomic)."""
    return name.startswith(".") and name[1:].rpartition(".")[0] in {_LOCK} | _OURS


def _results(folder: Path) -> bool:
    """Whether a command has written more into the folder than its request, logs and empty files."""
    files = (path for path in folder.rglob("*") if _PREPARED.isdisjoint(path.relative_to(folder).parts))
    return any(path.is_file() and path.stat().st_size for path in files)
