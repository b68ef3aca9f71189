"""The recipes that come with hvdkit: list them, find one by its name, copy one to change it."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from hvdkit import paths
from hvdkit.errors import RequestError
from hvdkit.recipe.yaml_files import SCHEMA_LINE, schema_line
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.runtimes.store import unknown

SCHEMA = "recipe.schema.json"  # beside the recipes, written by scripts/schemas.py


@dataclass(frozen=True)
class Entry:
    """One recipe: its name, the first comment of its file as description, and the file's path."""

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
    """Copy a recipe (`NAME.yaml`) or a framework's script (`FRAMEWORK/resnet.py`) into a folder, or to a file whose
    name has the same ending.

    Returns the path of the copy. The folder is created if it does not exist. Raises RequestError if the name is neither
    a recipe nor a framework, if the target exists already, or if the folder cannot be written.
    """
    known = {entry.name: entry.path for entry in entries()}
    source = paths.script(name) if name in FRAMEWORKS else known.get(name.removesuffix(".yaml"))
    if source is None:
        raise RequestError(unknown("recipe or framework", name, [*known, *FRAMEWORKS]))
    is_file = destination.suffix == source.suffix and not destination.is_dir()
    target = destination if is_file else destination / source.relative_to(paths.recipes())
    if os.path.lexists(target):
        raise RequestError(f"{target}: is there already and is not overwritten; name another folder")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        text = source.read_text(encoding="utf-8")  # its schema does not lie beside the copy
        target.write_text(text.replace(schema_line(SCHEMA), schema_line(paths.recipes() / SCHEMA)), encoding="utf-8")
    except OSError as error:
        with contextlib.suppress(OSError):  # an incomplete copy would block the next attempt
            target.unlink()
        raise RequestError(f"{target}: cannot be written ({error.strerror}); name another folder") from error
    return target


def _description(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    first = next((line for line in lines if not line.startswith(SCHEMA_LINE)), "")
    return first.lstrip("# ").rstrip() if first.startswith("#") else ""
