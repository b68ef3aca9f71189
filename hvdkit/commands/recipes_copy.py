"""`hvdkit recipes copy`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from hvdkit.commands.request import Argument, Request
from hvdkit.recipe import registry


class RecipesCopyRequest(Request):
    """Copy a recipe, or the script that runs recipes under a framework, for you to change."""

    name: Annotated[str, Argument("a recipe's YAML or a framework's script", metavar="NAME|FRAMEWORK")]
    destination: Annotated[Path, Argument("the folder to copy into", metavar="[DEST]")] = Path()


def run(request: RecipesCopyRequest) -> Path:
    """The copy. Raises RequestError."""
    return registry.copy(request.name, request.destination)


def lines(request: RecipesCopyRequest, result: Path) -> Iterator[str]:
    """What is written."""
    yield f"copied to {result}"
