"""A recipe as a command gets it: read with its overrides, and nothing left to its folder of images."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdkit.commands.request import say
from hvdkit.errors import RequestError
from hvdkit.recipe import registry, schema
from hvdkit.recipe.schema import Recipe


def loaded(
    request: Any, resumed: Path | None = None, extra: Sequence[str] = (), recipe: Any = None, trains: bool = False
) -> Recipe:
    """The recipe of a request with its overrides and `extra` ones; what loading it has to say is printed.

    Raises RequestError as `load` does, and for `batch_size: auto` where the command does not train (`trains`).
    """
    overrides = [*(request.overrides or []), *extra]
    read, lines = load(recipe or request.recipe, overrides, resumed, request.overrides_from)
    say(lines)
    if read.finds_batch_size and not trains:
        raise RequestError("batch_size: expected a number, got auto, which `hvdkit train` finds when it starts")
    return read


def load(
    recipe: Path | Mapping[str, Any],
    overrides: list[str],
    resumed: Path | None = None,
    overrides_from: str = "overrides",
) -> tuple[Recipe, list[str]]:
    """The recipe of a file, of a name or of a file's content, and lines for the user: what was found in its folder of
    images, and what looks like a mistake.

    What it leaves to a folder of images is decided here, as in the run in the folder `resumed` if there is one. Raises
    RequestError with all faults; `overrides_from` is where the overrides come from.
    """
    lines: list[str] = []
    beside = None
    if isinstance(recipe, Path):
        if recipe.suffix == ".py":
            example = f"`model: {{name: own, script: {recipe.name}}}` (docs/own-model.md)"
            started = f"a script is started by `hvdkit launch {recipe}`"
            raise RequestError(f"{recipe}: expected a recipe, YAML, for a class with {example}; {started}")
        file = registry.locate(recipe)
        read, beside = schema.load(file, overrides, lines, overrides_from), file.parent
    else:
        read = schema.revise(dict(recipe), "recipe", overrides, lines, overrides_from)
    if isinstance(read.model, schema.OwnModel):
        from hvdkit.commands import own_script

        read = own_script.located(read, beside, overrides)
    if not isinstance(read.data, schema.ImageFolder):
        return read, lines
    from hvdkit.tasks import folder  # NumPy comes with it

    earlier = None
    if resumed is not None:
        with contextlib.suppress(RequestError):  # no run is there yet
            earlier = schema.load(resumed / "config.yaml")
    decision = folder.decide(read, earlier)
    return decision.recipe, [*lines, *decision.lines, *(f"warning: {line}" for line in decision.warnings)]
