"""Arguments of Python functions, checked by their annotations and turned into what commands take."""

from __future__ import annotations

import functools
import inspect
import json
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from hvdkit import paths
from hvdkit.errors import Faults, RequestError

PathLike = str | os.PathLike[str]
AnyRecipe = PathLike | Mapping[str, Any]  # a file, a name from `hvdkit recipes list`, or the content of a file
Settings = Mapping[str, Any] | Iterable[str] | None  # {"epochs": 2} or ["epochs=2"]; dots lead to nested keys
Names = str | Iterable[str] | None  # one or several
Wholes = int | Iterable[int] | None  # one or several
Paths = PathLike | Iterable[PathLike]  # one or several
P = ParamSpec("P")
R = TypeVar("R")


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which raises RequestError for arguments of other types than it is annotated with (`_KINDS`)."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        try:
            bound = signature.bind(*arguments, **options)
        except TypeError as error:
            if "overrides" in signature.parameters:
                error.add_note('keys of the recipe are given in a dictionary, such as overrides={"epochs": 2}')
            raise
        faults = Faults()
        for name, value in bound.arguments.items():
            kind = str(signature.parameters[name].annotation)
            is_one, expected = _KINDS[kind.removesuffix(" | None")]
            if is_one(value) and kind.startswith(_PATH_KINDS):
                with faults.collected():
                    bound.arguments[name] = with_home(value)
            if not (is_one(value) or (value is None and kind.endswith(" | None"))):
                faults.append(f"{name}: expected {expected}, got {value!r}")
        faults.report()
        return function(*bound.args, **bound.kwargs)

    return call


def with_home(value: Any) -> Any:
    """A path, or each of several, with the home folder in place of `~`; anything else as it is. Raises RequestError."""
    if isinstance(value, list | tuple):
        return [with_home(item) for item in value]
    return paths.expanded(value) if _is_path(value) and os.fspath(value).startswith("~") else value


def texts(name: str, given: Settings) -> list[str]:
    """The settings as `key=value`, with values in JSON, which is YAML. Raises RequestError for what has no JSON."""
    if isinstance(given, str):
        raise RequestError(f"{name}: expected a dictionary, or a list such as [{given!r}], got a text")
    if not isinstance(given, Mapping):
        words = list(given or [])
        if wrong := [word for word in words if not isinstance(word, str)]:
            raise RequestError(f'{name}: expected words such as "epochs=2", got {wrong[0]!r}')
        return words
    texts = []
    for key, value in given.items():
        try:
            texts.append(f"{key}={json.dumps(value, ensure_ascii=False, default=_plain)}")
        except (TypeError, ValueError) as error:
            raise RequestError(f"{name}: {key}: expected a number, text, list or dictionary ({error})") from None
    return texts


def listed(names: Names) -> list[str]:
    """The names, of which one may stand alone."""
    return [names] if isinstance(names, str) else list(names or [])


def wholes(numbers: Wholes) -> list[int]:
    """The numbers, of which one may stand alone; NumPy's as Python's."""
    given = numbers if isinstance(numbers, Iterable) else () if numbers is None else (numbers,)
    return [operator.index(number) for number in given]


def joined(hosts: Names) -> str | None:
    """Hosts as the command line takes them, None for none."""
    return ",".join(listed(hosts)) or None


def as_path(given: PathLike | None) -> Path | None:
    """The path, or None."""
    return None if given is None else Path(given)


def as_paths(given: Paths) -> list[Path]:
    """The paths, of which one may stand alone."""
    return [Path(given)] if isinstance(given, str | os.PathLike) else [Path(path) for path in given]


def _plain(value: Any) -> Any:
    """A path as text, NumPy's numbers and arrays as Python's."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if callable(tolist := getattr(value, "tolist", None)):
        return tolist()
    raise TypeError(f"got {type(value).__name__}")


def _known(value: Any) -> Iterable[Any]:
    """The value, or its elements; none of an iterator, which can be used only once."""
    if isinstance(value, Collection) and not isinstance(value, str):
        return value
    return () if value is None or isinstance(value, Iterator) else (value,)


def _is_whole(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return hasattr(value, "__float__") and not isinstance(value, bool)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def _is_recipe(value: object) -> bool:
    return _is_path(value) or isinstance(value, Mapping)


def _is_profile(value: object) -> bool:
    return _is_path(value) or hasattr(value, "folder")


_PATH_KINDS = ("PathLike", "Paths", "AnyRecipe")  # as the annotations of paths begin
# Annotations of parameters, as they are written: whether a value is of that kind, and what is expected.
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "bool": (lambda value: isinstance(value, bool), "True or False"),
    "int": (_is_whole, "a whole number"),
    "float": (_is_number, "a number"),
    "str": (_is_text, "a text"),
    "PathLike": (_is_path, "a path"),
    "Names": (lambda value: all(map(_is_text, _known(value))), "a text, or a list of texts"),
    "Wholes": (lambda value: all(map(_is_whole, _known(value))), "a whole number, or a list of them"),
    "Paths": (lambda value: all(map(_is_path, _known(value))), "a path, or a list of paths"),
    "Settings": (lambda value: value is None or isinstance(value, Iterable), "a dictionary, or a list of key=value"),
    "Mapping[str, Any]": (lambda value: isinstance(value, Mapping), "a dictionary"),
    "AnyRecipe": (_is_recipe, "a recipe's name, file or content"),
    "PathLike | Profile": (_is_profile, "a profile, or its file"),
    "AnyRecipe | Profile": (lambda value: _is_recipe(value) or _is_profile(value), "a recipe or a profile"),
}
