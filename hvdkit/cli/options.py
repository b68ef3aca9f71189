"""What several commands share: options, loading the recipe, printing tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hvdkit.cli import completion
from hvdkit.errors import LARGEST, RequestError

if TYPE_CHECKING:
    from rich.table import Table

    from hvdkit.recipe.schema import Recipe

RIVALS = "plain, ddp, multiworker, kvstore or independent"
RecipeFile = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE.yaml",
        help="the recipe: a file, or a name from `hvdkit recipes list`",
        autocompletion=completion.recipes,
    ),
]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[key=value]...", help="such as epochs=2")]
_FRAMEWORK = "pytorch, tensorflow, keras or mxnet"
Framework = Annotated[str, typer.Option(help=_FRAMEWORK, autocompletion=completion.frameworks)]
WritersFramework = Annotated[
    str | None,
    typer.Option(help=_FRAMEWORK, show_default="that of the checkpoint", autocompletion=completion.frameworks),
]
TrainedFramework = Annotated[
    str | None,
    typer.Option(
        help=_FRAMEWORK,
        show_default="pytorch, or that of the script or of the run to resume",
        autocompletion=completion.frameworks,
    ),
]
Frameworks = Annotated[
    list[str] | None,
    typer.Option(help="may be repeated", show_default="all four", autocompletion=completion.frameworks),
]
Ranks = Annotated[int, typer.Option("-np", "--np", "-n", help="number of ranks")]
Hosts = Annotated[
    str | None, typer.Option("-H", "--hosts", help="host:slots or netns:NAME:slots,...", show_default="this machine")
]
Launcher = Annotated[str, typer.Option(help="direct (this machine) or horovodrun", autocompletion=completion.launchers)]
StallTimeout = Annotated[float, typer.Option(help="seconds after which a rank that hangs ends the run; 0: never")]
Rivals = Annotated[
    list[str] | None,
    typer.Option("--rival", help=f"{RIVALS}; may be repeated", autocompletion=completion.rivals),
]
Log = Annotated[
    list[str] | None,
    typer.Option("--log", help="wandb, mlflow or tensorboard; may be repeated", autocompletion=completion.trackers),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace the results of an earlier run in the folder")]

DryRun = Annotated[bool, typer.Option("--dry-run", help="show what would be started, and start and write nothing")]
Json = Annotated[bool, typer.Option("--json", help="with --dry-run: as JSON")]


class App(typer.Typer):
    """A typer app that checks the numbers in all options of a command, and reports all faults at once."""

    def command(self, *arguments: Any, **settings: Any) -> Any:
        """The same as typer's."""
        return super().command(*arguments, **{"cls": _Command} | settings)


class _Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's context; typer may have a click of its own
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            known = {option for each in self.params for option in each.opts}
            if type(error).__name__ == "NoSuchOption" and any(each.name == "overrides" for each in self.params):
                from hvdkit.recipe.hints import as_overrides
                from hvdkit.recipe.schema import Recipe

                if message := as_overrides(given, known, Recipe):
                    raise RequestError(message) from None
            raise

    def invoke(self, ctx: Any) -> Any:
        faults = [fault for each in self.params for fault in _faults(each, ctx.params.get(each.name or ""))]
        if ctx.params.get("json") and not ctx.params["dry_run"]:
            faults.append("--json: expected --dry-run with it")
        if faults:
            raise RequestError("\n".join(faults))
        return super().invoke(ctx)


def _faults(parameter: Any, value: Any) -> list[str]:
    """The faults of an option's value or values that no command accepts."""
    name = parameter.opts[0]
    faults = []
    for each in value if isinstance(value, list | tuple) else [value]:
        if isinstance(each, int | float) and not -LARGEST <= each <= LARGEST:  # NaN too
            shown = f"{each:g}" if isinstance(each, float) else f"a number of {len(str(abs(each)))} digits"
            faults.append(f"{name}: expected a number of at most 2^53, got {shown}")
    return faults


def loaded(recipe: Path, overrides: list[str] | None, resumed: Path | None = None) -> Recipe:
    """The recipe of that file or name, with its overrides. Raises RequestError with all faults.

    What it leaves to a folder of images is decided here, as in the run in the folder `resumed` if there is one; what
    was found, and what looks like a mistake, is printed on standard error.
    """
    from hvdkit.commands.loading import load

    checked, lines = load(recipe, overrides or [], resumed)
    warn(lines)
    return checked


def warn(lines: Iterable[str]) -> None:
    """Print lines on standard error, which leaves standard output to results."""
    for line in lines:
        typer.echo(line, err=True)


def preview(claim: tuple[Any, ...], json: bool, name: str, *arguments: Any) -> None:
    """Print what that function of `commands.dry_run` finds, as JSON or as text, if the folder can be claimed."""
    from hvdkit import paths
    from hvdkit.commands import dry_run
    from hvdkit.report.dry_run import lines

    paths.check_free(*claim)
    found = getattr(dry_run, name)(*arguments)
    typer.echo(found.model_dump_json(indent=2) if json else "\n".join(lines(found)))


def show(tables: Iterable[Table], width: int) -> None:
    """Print tables, as wide as the terminal, or `width` characters without one."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else width)
    for table in tables:
        console.print(table)


def stderr(line: str) -> None:
    """Print a line on standard error; `sys.stderr` is what a progress bar has put in its place."""
    print(line, file=sys.stderr, flush=True)
