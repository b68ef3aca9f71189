"""`hvdkit recipes list`."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.commands.request import Request
from hvdkit.recipe import registry
from hvdkit.recipe.registry import Entry


class RecipesListRequest(Request):
    """List the recipes that come with hvdkit, each with a description."""


def run(request: RecipesListRequest) -> list[Entry]:
    """All recipes that come with hvdkit."""
    return registry.entries()


def lines(request: RecipesListRequest, result: list[Entry]) -> Iterator[str]:
    """A line for each."""
    for entry in result:
        yield f"{entry.name}: {entry.description}"
