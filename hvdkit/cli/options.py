"""What several commands share: options, dry runs, printing tables."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hvdkit.cli import completion
from hvdkit.defaults import MARGIN, OVERRIDES_FROM
from hvdkit.errors import LARGEST, RequestError

if TYPE_CHECKING:
    from rich.table import Table

RIVALS = "plain, ddp, zero_redundancy, fsdp, deepspeed, deepspeed_offload, multiworker, kvstore or independent"
RecipeFile = Annotated[
    Path,
    typer.Argument(
        metavar="RECIPE.yaml",
        help="the recipe: a file, or a name from `hvdkit recipes list`",
        autocompletion=completion.recipes,
    ),
]
OptionalRecipe = Annotated[
    Path | None,
    typer.Argument(metavar="RECIPE.yaml", help="the recipe, or --from instead", autocompletion=completion.recipes),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]...", help="such as epochs=2", autocompletion=completion.overrides),
]
NoAverage = Annotated[
    bool, typer.Option("--no-average", help="the weights themselves, where the checkpoint has an average of them")
]
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
BatchSizes = Annotated[
    str | None,
    typer.Option(metavar="8,16,32", help="measure compute at these batch sizes too", show_default="the recipe's"),
]
Hosts = Annotated[
    str | None,
    typer.Option(
        "-H", "--hosts", help="host:slots or netns:NAME:slots,..., or ./FILE of hosts", show_default="this machine"
    ),
]
LAUNCHER_HELP = "auto, direct (this machine), horovodrun, mpirun, slurm or ray"
Launcher = Annotated[str, typer.Option(help=LAUNCHER_HELP, autocompletion=completion.launchers)]
StallTimeout = Annotated[float, typer.Option(help="seconds after which a rank that hangs ends the run; 0: never")]
Debug = Annotated[bool, typer.Option("--debug", help="collect Horovod's and NCCL's own logs in RUN/debug, by rank")]
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
    """A typer app that checks the numbers in all options of a command, and reports a wrong request in one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**{"cls": _Group} | settings)

    def command(self, *arguments: Any, **settings: Any) -> Any:
        """The same as typer's."""
        return super().command(*arguments, **{"cls": Command} | settings)


class _Group(TyperGroup):
    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        with _one_line(ctx, None, args):
            return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with _one_line(ctx):
            return super().parse_args(ctx, args)


class Command(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # click's context; typer may have a click of its own
        given = list(args)
        if "" in given:
            before = given[given.index("") - 1] if given.index("") else ctx.command_path
            raise RequestError(f"an empty word after {before}: expected a value; is a variable of the shell not set?")
        with _one_line(ctx, self, given):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        from hvdkit.arguments import with_home  # `--help` needs it not

        for name, value in ctx.params.items():  # a shell leaves the ~ of --out=~/run as it is
            if isinstance(value[0] if isinstance(value, list | tuple) and value else value, Path):
                ctx.params[name] = with_home(value)
        faults = [fault for param in self.params for fault in _faults(param, ctx.params.get(param.name or ""))]
        if ctx.params.get("json") and not ctx.params["dry_run"]:
            faults.append("--json: expected --dry-run with it")
        if ctx.params.get("margin", MARGIN) != MARGIN and not ctx.params["baseline"]:
            faults.append("--margin: expected --baseline with it")
        if faults:
            raise RequestError("\n".join(faults))
        OVERRIDES_FROM.set("command line")
        return super().invoke(ctx)


@contextmanager
def _one_line(ctx: Any, command: TyperCommand | None = None, given: Sequence[str] = ()) -> Iterator[None]:
    """Raise what typer would print in a box as RequestError, with what may have been meant by the words `given`."""
    try:
        yield
    except Exception as error:
        kind = type(error).__name__
        if kind == "NoSuchOption" and command and any(param.name == "overrides" for param in command.params):
            from hvdkit.recipe.hints import as_overrides
            from hvdkit.recipe.schema import Recipe

            known = {option for param in command.params for option in param.opts}
            if message := as_overrides(given, known, Recipe):
                raise RequestError(message) from None
        if kind == "NoArgsIsHelpError" or not hasattr(error, "format_message"):  # click's errors have it
            raise
        said = " ".join(error.format_message().split()).removesuffix(".")
        if said.startswith("No such command"):
            from hvdkit.recipe.habits import COMMANDS

            if meant := COMMANDS.get(given[0].lower()) if ctx.parent is None else None:
                said = f"No such command {given[0]!r}. Did you mean `hvdkit {meant}`?"
        elif said.startswith("Invalid value for"):
            said = _of_value(error, given)
        raise RequestError(f"{said}; see `{ctx.command_path} --help`") from None


def _of_value(error: Any, given: Sequence[str]) -> str:
    """What is wrong with an option's value, with the option and the value as they were given."""
    name, value = error.param.opts[0], None
    for word, following in zip(given, [*given[1:], None], strict=True):
        option, equals, after = word.partition("=")
        if option in error.param.opts:
            name, value = option, after if equals else following
    whys = {"integer": "expected a whole number", "float": "expected a number", "number": "expected a number"}
    why = next((why for kind, why in whys.items() if f"valid {kind}" in error.message), None)
    why = why or error.message.rstrip(".").replace("Input should be", "expected")
    return f"{name}: {why}" if value is None else f"{name} {value}: {why}"


def _faults(parameter: Any, value: Any) -> list[str]:
    """The faults of an option's value or values that no command accepts."""
    name = parameter.opts[0]
    faults = []
    for number in value if isinstance(value, list | tuple) else [value]:
        if isinstance(number, int | float) and not -LARGEST <= number <= LARGEST:  # NaN too
            shown = f"{number:g}" if isinstance(number, float) else f"a number of {len(str(abs(number)))} digits"
            faults.append(f"{name}: expected a number of at most 2^53, got {shown}")
    return faults


def show(tables: Iterable[Table], width: int) -> None:
    """Print tables, as wide as the terminal, or `width` characters without one."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else width)
    for table in tables:
        console.print(table)
