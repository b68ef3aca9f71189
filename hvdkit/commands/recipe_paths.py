"""The files and folders that a recipe names, for a job that runs elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from hvdkit.commands import own_script
from hvdkit.recipe.schema import Recipe


def _paths(recipe: Recipe) -> dict[str, str]:
    """The paths in a recipe by key; of a script's options those that are on this machine."""
    sections = {"model": recipe.model, "data": recipe.data}
    paths = {
        f"{section}.{key}": value
        for section, keys in sections.items()
        for key in ("script", "module", "path", "weights", "tokens")
        if (value := getattr(keys, key, None)) and value != "bytes"
    }
    for section, keys in sections.items():
        options = getattr(keys, "options", {})
        paths |= {
            f"{section}.options.{key}": value
            for key, value in options.items()
            if isinstance(value, str) and value.startswith(("/", "~")) and os.path.lexists(os.path.expanduser(value))  # noqa: PTH111
        }
    return paths


def absolute(recipe: Recipe) -> Recipe:
    """The recipe with whole paths: a job starts in the folder in which it is handed over."""
    changes: dict[str, dict[str, str]] = {"model": {}, "data": {}}
    for key, value in _paths(recipe).items():
        section, _, name = key.partition(".")
        if "." not in name:
            changes[section][name] = os.path.abspath(value)  # noqa: PTH100 - keeps links
    return recipe.model_copy(
        update={section: getattr(recipe, section).model_copy(update=update) for section, update in changes.items()}
    )


def needed(recipes: Iterable[Recipe], mounted: Sequence[str] = ()) -> str:
    """What jobs of these recipes read that is in none of the folders `mounted`, each with its key."""
    named: dict[str, None] = {}
    for recipe in recipes:
        for key, value in _paths(recipe).items():
            path = Path(value)
            if any(path.is_relative_to(folder) for folder in mounted):
                continue
            beside = own_script.modules_of(path) if key in ("model.script", "data.module") else []
            named[f"{key} {value}" + (f" with {', '.join(beside)} beside it" if beside else "")] = None
    return ", ".join(named)
