"""The recipes that come with hvdkit: list them, find one by its name, copy one to change it."""

from __future__ import annotations

import contextlib
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from hvdkit import paths
from hvdkit.errors import RequestError, nearest
from hvdkit.recipe.yaml_files import SCHEMA_LINE, brief, named, schema_line
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
    if os.path.isfile(given / "config.yaml"):  # noqa: PTH113 - which raises nothing for a name that is too long
        run = named(given)
        raise RequestError(
            f"{run}: is the folder of a run; expected a recipe, such as {run}/config.yaml; "
            f"--out {shlex.quote(run)} --resume after it continues the run"
        )
    if os.path.lexists(given):
        return given
    known = {entry.name: entry.path for entry in entries()}
    if given.name in known and len(given.parts) == 1:
        return known[given.name]
    if given.stem in known:  # such as resnet20-digits.yaml, or recipes/resnet20-digits
        raise RequestError(f"{named(given)}: no such file; the recipe that comes with hvdkit is {given.stem}")
    if (given.suffix and "=" not in given.name) or len(given.parts) != 1:
        return given
    alike = [name for name in known if given.name.lower() in name]
    refusal = f"unknown recipe {brief(given.name)}: expected one of {', '.join(known)}"
    meant = f"; did you mean {' or '.join(map(repr, alike))}?" if alike else nearest(given.name, known)
    raise RequestError(f"{refusal}{meant}; a path ends in .yaml")


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
