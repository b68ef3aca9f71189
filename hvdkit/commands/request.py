"""What a command is asked for, declared once: a Request's fields are options of the command line and arguments of the
Python function, with their types, ranges, defaults and help.

A command is a module of this room, with `run(request: SomeRequest) -> Result` and `lines(request, result)`, which
yields what people read: lines and tables. It may have `status(result)`, the exit status of the command where a result
can be a bad one; `returned(result)`, what the Python function returns in place of the result; `preview(request)`, what
would be started; and `INSTEAD`, a command that has no name of its own on the command line: it is this one with its
options. `COMMANDS` names them; `function` and
`hvdkit/cli/generated.py` make the two interfaces of them.
"""

from __future__ import annotations

import inspect
import operator
import os
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Self, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from hvdkit import paths
from hvdkit.errors import LARGEST, Faults, RequestError


@dataclass(frozen=True)
class Option:
    """A field as an option: its help and its names, `--field-name` where none are given.

    `shown` is the default as the help has it.
    """

    help: str
    names: tuple[str, ...] = ()
    metavar: str | None = None
    shown: str | None = None
    old: tuple[str, ...] = ()  # names of earlier versions, which help does not show
    panel: str | None = None
    missing: str = "expected a value"  # told where it is needed and not given
    positional: bool = False  # in Python
    in_python: bool = True
    typed: bool = True  # on the command line

    def option(self, field: str) -> str:
        """What messages call it: its first name."""
        return self.names[0].partition("/")[0] if self.names else f"--{field.replace('_', '-')}"


@dataclass(frozen=True)
class Argument(Option):
    """A field without a name on the command line, and positional in Python."""

    def option(self, field: str) -> str:
        """What messages call it."""
        return (self.metavar or field).strip("[].")


@dataclass(frozen=True)
class Accepts:
    """What a Python function takes for the field where its type does not tell, and how that becomes the field's value.

    `annotation` stands in signatures, with the names of `hvdkit/__init__.pyi`.
    """

    annotation: str
    expected: str
    convert: Callable[[str, Any], Any]
    typed: Any = None  # what the command line takes, if not the field's type


@dataclass(frozen=True)
class Form:
    """How a text, or each of a list, has to look: a regular expression, and what is expected."""

    pattern: str
    expected: str

    def check(self, option: str, value: Any) -> None:
        """Raise RequestError for a text of another form."""
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and not re.fullmatch(self.pattern, text, re.ASCII):
                raise RequestError(f"{option} {text!r}: expected {self.expected}")


class Request(BaseModel):
    """Base of all. `typed` names the fields that were given on a command line, none in Python."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    typed: frozenset[str] = frozenset()

    @property
    def overrides_from(self) -> str:
        """Where changes to a recipe come from, as messages name it."""
        return "command line" if self.typed else "overrides"

    @classmethod
    def of(cls, given: Mapping[str, Any], typed: frozenset[str] = frozenset()) -> Self:
        """The request, with NumPy's numbers as Python's and one value in place of a list of one.

        Raises RequestError with all faults.
        """
        faults, values, declared = Faults(), {}, cls.declared()
        for name, value in given.items():
            with faults.collected():
                info, option = declared[name]
                values[name] = _converted(name, info, value)
                _check_size(option.option(name), values[name])
                if form := _only(info, Form, None):
                    form.check(option.option(name), values[name])
        faults.report()
        try:
            return cls(**values, typed=typed)
        except ValidationError as error:
            lines = dict.fromkeys(_fault(cls, fault) for fault in error.errors(include_url=False))
            raise RequestError("\n".join(lines)) from None

    @classmethod
    def declared(cls) -> dict[str, tuple[FieldInfo, Option]]:
        """The fields that users give: those of the command itself, then those that several commands have."""
        names = dict.fromkeys(name for kind in cls.__mro__ for name in inspect.get_annotations(kind))
        fields = {name: cls.model_fields[name] for name in names if name in cls.model_fields and name != "typed"}
        return {name: (info, _only(info, Option)) for name, info in fields.items()}


def say(lines: Iterable[str]) -> None:
    """Print lines on standard error, which a progress bar may have replaced."""
    for line in lines:
        print(line, file=sys.stderr, flush=True)


def function(name: str) -> Callable[..., Any]:
    """The Python function of a command: checks its arguments, and runs."""
    module = import_module(f"hvdkit.commands.{name}")
    kind: type[Request] = get_type_hints(module.run)["request"]
    returned = getattr(module, "returned", None)
    result = get_type_hints(returned or module.run)["return"]
    signature = inspect.Signature(_parameters(kind), return_annotation=result)

    def ask(*arguments: Any, **options: Any) -> Request:
        try:
            given = signature.bind(*arguments, **options).arguments
        except TypeError as error:
            if "overrides" in signature.parameters:
                error.add_note('keys of the recipe are given in a dictionary, such as overrides={"epochs": 2}')
            raise
        return kind.of(given)

    def call(*arguments: Any, **options: Any) -> Any:
        answer = module.run(ask(*arguments, **options))
        return returned(answer) if returned else answer

    call.__name__ = call.__qualname__ = name
    call.__doc__, call.__module__ = kind.__doc__, module.__name__
    call.__signature__ = signature  # type: ignore[attr-defined]
    if hasattr(module, "preview"):
        call.preview = lambda *arguments, **options: module.preview(ask(*arguments, **options))  # type: ignore[attr-defined]
    return call


def _parameters(kind: type[Request]) -> list[inspect.Parameter]:
    """Of the Python function: arguments come first."""
    parameters = []
    for name, (info, option) in kind.declared().items():
        if option.in_python:
            first = isinstance(option, Argument) or option.positional
            parameters.append(
                inspect.Parameter(
                    name,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD if first else inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if info.is_required() else info.default,
                    annotation=_annotation(info),
                )
            )
    return sorted(parameters, key=lambda parameter: (parameter.kind, parameter.default is not inspect.Parameter.empty))


_ACCEPTED: dict[Any, tuple[str, str]] = {
    bool: ("bool", "True or False"),
    int: ("int", "a whole number"),
    float: ("float", "a number"),
    str: ("str", "a text"),
    Path: ("PathLike", "a path"),
    list[str]: ("Names", "a text, or a list of texts"),
    list[int]: ("Wholes", "a whole number, or a list of them"),
    list[Path]: ("Paths", "a path, or a list of paths"),
    dict[str, Any]: ("Mapping[str, Any]", "a dictionary"),
}


def plain(info: FieldInfo) -> Any:
    """The type of an option: a field's without None and without its choices, such as int, list[str], Path."""
    accepts = _only(info, Accepts, None)
    kind: Any = accepts.typed if accepts and accepts.typed else info.annotation
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(one for one in get_args(kind) if one is not type(None))
    return type(get_args(kind)[0]) if get_origin(kind) is Literal else kind


def _annotation(info: FieldInfo) -> str:
    accepts = _only(info, Accepts, None)
    annotation = accepts.annotation if accepts else _ACCEPTED[plain(info)][0]
    return annotation if info.is_required() or info.default is not None else f"{annotation} | None"


def _only(info: FieldInfo, kind: type[Any], *default: Any) -> Any:
    return next((one for one in info.metadata if isinstance(one, kind)), *default)


def _converted(name: str, info: FieldInfo, value: Any) -> Any:
    """The value as the field's type has it, as far as it can be. Raises RequestError."""
    if value is None:
        return None
    if accepts := _only(info, Accepts, None):
        return accepts.convert(name, value)
    kind = plain(info)
    if get_origin(kind) is not list:
        return dict(value) if isinstance(value, Mapping) else _one(kind, value)
    value = value.tolist() if hasattr(value, "tolist") else value
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes)
    return [_one(get_args(kind)[0], item) for item in (value if several else [value])]


def _one(kind: type, value: Any) -> Any:
    if kind is int and hasattr(value, "__index__") and not isinstance(value, bool):
        return operator.index(value)
    if kind is float and hasattr(value, "__float__") and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str | os.PathLike):
        return as_path(value)
    return value


def _check_size(option: str, value: Any) -> None:
    """Raise RequestError for a number that a float does not have exactly, which no command accepts."""
    for number in value if isinstance(value, list) else [value]:
        if isinstance(number, int | float) and not -LARGEST <= number <= LARGEST:  # NaN too
            shown = f"{number:g}" if isinstance(number, float) else f"a number of {len(str(abs(number)))} digits"
            raise RequestError(f"{option}: expected a number of at most 2^53, got {shown}")


def as_path(value: str | os.PathLike[str]) -> Path:
    """The path, with the home folder in place of `~`. Raises RequestError for that of a user who is not there."""
    return paths.expanded(value) if os.fspath(value).startswith("~") else Path(value)


def _fault(kind: type[Request], fault: Any) -> str:
    """A fault that pydantic has found, as one line: the option with its value for a range, else the argument."""
    name, value = str(fault["loc"][0]), fault["input"]
    info, option = kind.declared()[name]
    if fault["type"] == "literal_error":
        expected = fault["ctx"]["expected"].replace("'", "")
    elif "_than" in fault["type"]:
        expected = bounds(info)
    else:
        accepts = _only(info, Accepts, None)
        expected = accepts.expected if accepts else _ACCEPTED[plain(info)][1]
        return f"{name}: expected {expected}, got {value!r}"
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    shown = shown if shown.isprintable() else repr(value)
    given = shown if isinstance(option, Argument) else f"{option.option(name)} {shown}"
    return f"{given}: expected {expected}"


def bounds(info: FieldInfo) -> str:
    """The range of a number in words, such as `more than 0, at most 3,600`; empty without one."""
    words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    limits = [(word, getattr(one, name, None)) for name, word in words.items() for one in info.metadata]
    return ", ".join(f"{word} {limit:,}" for word, limit in limits if limit is not None)
