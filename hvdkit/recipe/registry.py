"""The recipes that come with hvdkit: list them, find one by its name, copy one to change it."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from hvdkit import paths
from hvdkit.errors import RequestError
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.runtimes.store import unknown


@dataclass(frozen=True)
class Entry:
    """One recipe: its name, the first comment line of its file as description, and the file's path."""

    name: str
    description: str
    path: Path


def entries() -> list[Entry]:
    """All recipes that come with hvdkit, sorted by name."""
    return [Entry(path.stem, _description(path), path) for path in sorted(paths.recipes().glob("*.yaml"))]


def locate(given: Path) -> Path:
    """The file of a recipe that a user gives as a path, or as the name of a recipe that comes with hvdkit.

    A file in the current folder takes precedence. A path that does not exist is returned as it is, and reading it fails
    later; an unknown name raises RequestError.
    """
    if given.suffix or len(given.parts) != 1 or os.path.lexists(given):
        return given
    known = {entry.name: entry.path for entry in entries()}
    if given.name not in known:
        raise RequestError(f"{unknown('recipe', given.name, known)}; a path ends in .yaml")
    return known[given.name]


def copy(name: str, destination: Path) -> Path:
    """Copy a recipe (`NAME.yaml`) or a framework's script (`FRAMEWORK/resnet.py`) into a folder.

    Returns the path of the copy. The folder is created if it does not exist. Raises RequestError if the name is neither
    a recipe nor a framework, if the target exists already, or if the folder cannot be written.
    """
    known = {entry.name: entry.path for entry in entries()}
    source = paths.script(name) if name in FRAMEWORKS else known.get(name.removesuffix(".yaml"))
    if source is None:
        raise RequestError(unknown("recipe or framework", name, [*known, *FRAMEWORKS]))
    target = destination / source.relative_to(paths.recipes())
    if os.path.lexists(target):
        raise RequestError(f"{target}: is there already and is not overwritten; name another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    except OSError as error:
        with contextlib.suppress(OSError):  # an incomplete copy would block the next attempt
            target.unlink()
        raise RequestError(f"{target}: cannot be written ({error.strerror}); name another folder") from error
    return target


def _description(path: Path) -> str:
    first = path.read_text(encoding="utf-8").split("\n", 1)[0]
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""
