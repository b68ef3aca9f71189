"""What all functions of hvdkit's Python interface do around the work: recipe, folder, messages."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdkit import paths
from hvdkit.arguments import AnyRecipe, PathLike, Settings, texts
from hvdkit.defaults import OVERRIDES_FROM

if TYPE_CHECKING:
    from hvdkit.recipe.schema import Recipe
    from hvdkit.results.dry_run import DryRun
    from hvdkit.results.profile import Profile

starts_nothing: ContextVar[bool] = ContextVar("starts_nothing", default=False)  # set in a dry run


class Described(Exception):
    """Ends a dry run, and is no error."""

    def __init__(self, run: DryRun) -> None:
        super().__init__()
        self.run = run


@contextmanager
def claimed(
    out: Path,
    overwrite: bool,
    resume: bool = False,
    inputs: Sequence[Path | str | None] = (),
    dry: tuple[Any, ...] = (),
) -> Iterator[Path]:
    """The folder `out` for this command.

    A dry run ends here. `dry` names the function of `commands.dry_run` that describes what would be started, and has
    its arguments.
    """
    if starts_nothing.get():
        from hvdkit.commands import dry_run

        paths.check_free(out, overwrite, resume, inputs)
        name, *arguments = dry
        raise Described(getattr(dry_run, name)(*arguments))
    with paths.claimed(out, overwrite, resume, inputs) as folder:
        yield folder


def load_recipe(
    recipe: AnyRecipe, overrides: Settings, resumed: Path | None = None, extra: Sequence[str] = ()
) -> Recipe:
    """The recipe with its overrides; what loading it has to say is printed."""
    from hvdkit.commands.loading import load

    given = copy.deepcopy(dict(recipe)) if isinstance(recipe, Mapping) else Path(recipe)
    read, lines = load(given, [*texts("overrides", overrides), *extra], resumed, OVERRIDES_FROM.get())
    say(lines)
    return read


def profile_file(profile: PathLike | Profile) -> Path:
    """The file of a profile that is given as a path or as the result of `profile`."""
    from hvdkit.results.profile import Profile

    return profile.folder / "profile.json" if isinstance(profile, Profile) else Path(profile)


def show_line(line: str) -> None:
    """Print a line on standard error."""
    print(line, file=sys.stderr, flush=True)  # `sys.stderr` is what a progress bar has put in its place


def say(lines: Iterable[str]) -> None:
    """Print lines on standard error."""
    for line in lines:
        show_line(line)
