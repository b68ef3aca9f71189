"""What several commands of the command line share: options, the recipe, tables. It loads nothing before it is used."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hvdkit.errors import LARGEST, RequestError

if TYPE_CHECKING:
    from rich.table import Table

    from hvdkit.recipe.schema import Recipe

RIVALS = "plain, ddp, multiworker, kvstore or independent"
RecipeFile = Annotated[
    Path, typer.Argument(metavar="RECIPE.yaml", help="the recipe: a file, or a name from `hvdkit recipes list`")
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="such as epochs=2")]
Framework = Annotated[str, typer.Option(help="pytorch, tensorflow, keras or mxnet")]
Frameworks = Annotated[list[str] | None, typer.Option(help="may be repeated", show_default="all four")]
Ranks = Annotated[int, typer.Option("-np", "--np", help="number of ranks")]
Hosts = Annotated[
    str | None, typer.Option("-H", "--hosts", help="host:slots or netns:NAME:slots,...", show_default="this machine")
]
Launcher = Annotated[str, typer.Option(help="direct (this machine) or horovodrun")]
StallTimeout = Annotated[float, typer.Option(help="seconds after which a rank that hangs ends the run; 0: never")]
Rivals = Annotated[list[str] | None, typer.Option("--rival", help=f"{RIVALS}; may be repeated")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace what an earlier run left in the folder")]


class App(typer.Typer):
    """Commands whose options are checked for what no command can make sense of, all at once."""

    def command(self, *arguments: Any, **settings: Any) -> Any:
        """As typer's."""
        return super().command(*arguments, **{"cls": _Command} | settings)


class _Command(TyperCommand):
    def invoke(self, ctx: Any) -> Any:  # click's context, whichever click typer brings along
        faults = [fault for each in self.params for fault in _faults(each, ctx.params.get(each.name or ""))]
        if faults:
            raise RequestError("\n".join(faults))
        return super().invoke(ctx)


def _faults(parameter: Any, value: Any) -> list[str]:
    """What is wrong with an option's value, or each of its values, whatever the command."""
    name = parameter.opts[0]
    faults = []
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, int | float) and not -LARGEST <= each <= LARGEST:  # NaN too
            shown = f"{each:g}" if isinstance(each, float) else f"a number of {len(str(abs(each)))} digits"
            faults.append(f"{name}: expected a number of at most 2^53, got {shown}")
    return faults


def loaded(recipe: Path, overrides: list[str] | None) -> Recipe:
    """The recipe of that file or name, with what is changed in it. Raises RequestError with all its faults."""
    from hvdkit.recipe import registry, schema

    return schema.load(registry.locate(recipe), overrides or [])


def show(tables: Iterable[Table], width: int) -> None:
    """Print tables, as wide as the terminal; where there is none, `width` characters."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else width)
    for table in tables:
        console.print(table)
