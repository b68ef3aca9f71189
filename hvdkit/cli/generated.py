"""A command of typer's, made of a command's Request. A command's module is imported when the command is used."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import is_dataclass
from functools import cached_property
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from hvdkit.commands import COMMANDS, EXAMPLES
from hvdkit.errors import Faults, RequestError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from hvdkit.commands.request import Option, Request

_DRY_RUN = typer.Option("--dry-run", help="show what would be started, and start and write nothing")
_JSON = typer.Option("--json", help="print the result as JSON: what the command's file has")


HELP = {"help_option_names": ["-h", "--help"]}
_WIDTH = 160  # characters of a table where there is no terminal


class _Lazy(TyperCommand):
    """A command in a list, of which only name and help are known; it becomes the whole one when it is used."""

    command: str
    module: str

    @cached_property
    def whole(self) -> TyperCommand:
        """The command with its parameters."""
        app = typer.Typer(add_completion=False)
        # What follows the first argument of a command with OWN_WORDS is not the command's.
        own = hasattr(import_module(f"hvdkit.commands.{self.module}"), "OWN_WORDS")
        settings = {"allow_interspersed_args": False} if own else None
        epilog = examples(self.command)
        app.command(self.name, help=self.help, epilog=epilog, context_settings=settings)(_callback(self.module))
        command: Any = typer.main.get_command(app)
        words = [word.metavar or f"[{word.name}]..." for word in command.params if word.param_type_name == "argument"]
        command.collect_usage_pieces = lambda context: ["[OPTIONS]", *words]  # typer puts a metavar into brackets
        return command  # type: ignore[no-any-return]

    def make_context(self, info_name: Any, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The whole command's: what runs, completes or explains a command begins with it."""
        if args and (longer := f"{self.name} {args[0]}") in COMMANDS:
            other = lazy(longer)(longer, help=COMMANDS[longer])
            return other.make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return self.whole.make_context(info_name, _renamed(self.module, args), parent, **extra)


def lazy(command: str) -> type[TyperCommand]:
    """The class of a command, by its name in `COMMANDS`: of `runtime build` in `hvdkit/commands/runtime_build.py`."""
    module = command.replace(" ", "_").replace("-", "_")
    return type("Lazy", (_Lazy,), {"command": command, "module": module})


def _renamed(module: str, words: list[str]) -> list[str]:
    """The words with today's names of options, up to `--`."""
    declared = _request(import_module(f"hvdkit.commands.{module}")).declared()
    names = {old: option.option(name) for name, (_, option) in declared.items() for old in option.old}
    end = words.index("--") if "--" in words else len(words)
    parts = [word.partition("=") for word in words[:end]]
    return [f"{names.get(word, word)}{equals}{value}" for word, equals, value in parts] + words[end:]


def examples(command: str) -> str:
    """What stands below a command's options: lines that can be typed, each a paragraph of its own."""
    return "\n\n".join(["Examples:" if EXAMPLES[command][1:] else "Example:", *EXAMPLES[command]])


def _callback(name: str) -> Callable[..., int]:
    """What typer takes a command's parameters from, and calls with them."""
    module = import_module(f"hvdkit.commands.{name}")
    mine = _request(module)
    instead = import_module(f"hvdkit.commands.{module.INSTEAD}") if hasattr(module, "INSTEAD") else module
    other = _request(instead)
    fields = _typed(mine) | _added(mine, other)
    needed = set(_needed(mine)) & set(_needed(other))
    parameters = [_parameter(name, *field, name in needed) for name, field in fields.items()]
    if hasattr(module, "preview"):
        parameters.append(_named("dry_run", bool, _DRY_RUN, False))
    if printable(module):
        parameters.append(_named("json", bool, _JSON, False))

    def callback(context: typer.Context, **values: Any) -> int:
        dry, as_json = values.pop("dry_run", False), values.pop("json", False)
        given = {name: not value if _turned(fields[name][1]) else value for name, value in values.items()}
        sources = {name: context.get_parameter_source(name) for name in context.params}
        typed = frozenset(name for name, source in sources.items() if source and source.name == "COMMANDLINE")
        command, kind = module, mine
        if any(given[name] is not None for name in _added(mine, other)):
            _check_alone(mine, other, typed)
            command, kind = instead, other
        if missing := [name for name in _needed(kind) if given[name] is None]:
            option = fields[missing[0]][1]
            raise RequestError(f"{option.option(missing[0])}: {option.missing}")
        request = kind.of({name: given[name] for name in _typed(kind)}, typed.intersection(_typed(kind)))
        if dry:
            from hvdkit.commands.dry_run import lines

            plan = command.preview(request)
            typer.echo(plan.model_dump_json(indent=2) if as_json else "\n".join(lines(plan)))
            return 0
        result = command.run(request)
        if as_json:
            from pydantic import TypeAdapter

            typer.echo(TypeAdapter(printable(command)).dump_json(result, indent=2).decode())
        else:
            show(command.lines(request, result))
        return command.status(result) if hasattr(command, "status") else 0

    parameters.append(inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context))
    callback.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    callback.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return callback


def printable(module: ModuleType) -> Any:
    """The type of a command's result if `--json` can print it: models and dataclasses, and lists of them; else None.

    A command with OWN_WORDS has another program's output on standard output.
    """
    from pydantic import BaseModel

    result = get_type_hints(getattr(module, "returned", module.run))["return"]
    kinds = get_args(result) or (result,)
    models = all(isinstance(kind, type) and (issubclass(kind, BaseModel) or is_dataclass(kind)) for kind in kinds)
    return result if models and not hasattr(module, "OWN_WORDS") else None


def _request(module: ModuleType) -> type[Request]:
    kind: type[Request] = get_type_hints(module.run)["request"]
    return kind


def _typed(kind: type[Request]) -> dict[str, tuple[FieldInfo, Option]]:
    return {name: field for name, field in kind.declared().items() if field[1].typed}


def _added(mine: type[Request], other: type[Request]) -> dict[str, tuple[FieldInfo, Option]]:
    """The fields of the other command that this one has not."""
    return {name: field for name, field in other.declared().items() if name not in mine.declared()}


def _needed(kind: type[Request]) -> list[str]:
    return [name for name, (info, _) in kind.declared().items() if info.is_required()]


def _check_alone(mine: type[Request], other: type[Request], typed: Collection[str]) -> None:
    """Raise RequestError for an option of this command beside those of the other one, and for what that lacks."""
    added = _added(mine, other)
    first = next(option.option(name) for name, (_, option) in added.items())
    missing = [added[name][1].option(name) for name in _needed(other) if name in added and name not in typed]
    wrong = [
        option.option(name)
        for name, (_, option) in mine.declared().items()
        if name in typed and name not in other.declared()
    ]
    wrong += ["--dry-run"] if "dry_run" in typed else []
    faults = Faults([f"{', '.join(missing)}: needed too, beside {first}"] if missing else [])
    faults += [f"{', '.join(wrong)}: leave it out beside {first}"] if wrong else []
    faults.report()


def _parameter(name: str, info: FieldInfo, option: Option, needed: bool) -> inspect.Parameter:
    """A field as typer's argument or option."""
    from hvdkit.commands.request import Argument, plain

    kind: Any = plain(info)
    words: dict[str, Any] = {
        "help": option.help,
        "metavar": option.metavar,
        "show_default": option.shown or True,
        "rich_help_panel": option.panel,
        "readable": False,  # the command says what it cannot read
    }
    default = None if info.is_required() else info.default
    if isinstance(option, Argument):
        declared: Any = typer.Argument(**words)
    else:
        names = option.names or ((option.option(name),) if kind is bool else ())
        declared = typer.Option(*names, **words)
    if needed:
        return _named(name, kind, declared, inspect.Parameter.empty)
    if default is None:
        kind |= None
    return _named(name, kind, declared, not default if _turned(option) else default)


def _named(name: str, kind: Any, declared: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, declared]
    )


def _turned(option: Option | None) -> bool:
    """Whether the option is the contrary of its field."""
    return option is not None and option.names[:1] != () and option.names[0].startswith("--no-")


def show(lines: Iterable[Any]) -> None:
    """Print lines, and what rich has as wide as the terminal, or _WIDTH characters without one."""
    console = None
    for line in lines:
        if isinstance(line, str):
            typer.echo(line)
            continue
        if console is None:
            from rich.console import Console

            console = Console(width=None if sys.stdout.isatty() else _WIDTH)
        console.print(line, soft_wrap=hasattr(line, "plain"))  # a text, which stays one line
