"""What all commands share: a wrong request is one line, tables are printed."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hvdkit.errors import RequestError

if TYPE_CHECKING:
    pass

_WIDTH = 160  # characters of a table where there is no terminal
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace the results of an earlier run in the folder")]


class App(typer.Typer):
    """A typer app that reports a wrong request in one line."""

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
        from hvdkit import paths  # `--help` needs it not

        for name, value in ctx.params.items():  # a shell leaves the ~ of --out=~/run as it is
            if isinstance(value, Path):
                ctx.params[name] = paths.expanded(value)
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


def show(lines: Iterable[Any]) -> None:
    """Print lines, and tables as wide as the terminal, or _WIDTH characters without one."""
    console = None
    for line in lines:
        if isinstance(line, str):
            typer.echo(line)
            continue
        if console is None:
            from rich.console import Console

            console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        console.print(line)
