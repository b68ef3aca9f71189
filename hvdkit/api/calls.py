"""What all functions of hvdkit's Python interface do around the work: recipe, folder, messages."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit.arguments import AnyRecipe, Settings, texts
from hvdkit.defaults import OVERRIDES_FROM

if TYPE_CHECKING:
    from hvdkit.recipe.schema import Recipe


def load_recipe(
    recipe: AnyRecipe, overrides: Settings, resumed: Path | None = None, extra: Sequence[str] = ()
) -> Recipe:
    """The recipe with its overrides; what loading it has to say is printed."""
    from hvdkit.commands.loading import load

    given = copy.deepcopy(dict(recipe)) if isinstance(recipe, Mapping) else Path(recipe)
    read, lines = load(given, [*texts("overrides", overrides), *extra], resumed, OVERRIDES_FROM.get())
    say(lines)
    return read


def show_line(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr, flush=True)  # `sys.stderr` is what a progress bar has put in its place


def say(lines: Iterable[str]) -> None:
    """Print lines on standard error."""
    for line in lines:
        show_line(line)
