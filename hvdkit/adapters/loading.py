"""Helps adapters whose framework imports more than a rank needs."""

from __future__ import annotations

import builtins
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

_DEFINITION = re.compile(r"\s*def (\w+)\(")


@contextmanager
def without(*packages: str) -> Iterator[None]:
    """A context in which importing the packages fails as if they were not installed.

    Afterwards they can be imported as usual. Nothing changes for a package that has been imported before. CPU time of
    an import, two cores, medians of 5:

    - TensorFlow 2.21: 3.2 s instead of 4.4 s without scikit-learn, which Keras imports for wrappers that training does
      not need;
    - MXNet 1.9.1: 1.1 s instead of 1.4 s without scikit-learn and `scipy.stats`, which it imports for the deprecated
      class FeedForward, its test helpers and the entropy mode of quantization.
    """
    blocked = [package for package in packages if package not in sys.modules]
    for package in blocked:
        sys.modules[package] = None  # type: ignore[assignment]  # makes Python raise ModuleNotFoundError
    try:
        yield
    finally:
        for package in blocked:
            del sys.modules[package]


@contextmanager
def compiled_late(package: str) -> Iterator[None]:
    """A context in which a package's `exec(SOURCE, None, {})` does not compile the function that the source defines.

    The function compiles itself when it is first called. All else is executed as always.

    On import, MXNet 1.9.1 writes 2,500 functions as Python source, for its operators, and compiles each: 0.5 of 0.93 s
    of CPU time (two cores). A model calls a few dozen of them.
    """
    execute = builtins.exec

    def run(source: Any, names: Any = None, local: Any = None, /, **more: Any) -> None:
        scope = sys._getframe(1)
        if names is None:
            names, local = scope.f_globals, scope.f_locals if local is None else local
            own = names.get("__name__", "").partition(".")[0] == package and isinstance(source, str)
            if own and local == {} and (definition := _DEFINITION.match(source)):
                local[definition[1]] = late(source, definition[1], names)
                return
        execute(source, names, local, **more)

    builtins.exec = run
    try:
        yield
    finally:
        builtins.exec = execute


def late(source: str, name: str, names: dict[str, Any]) -> Callable[..., Any]:
    """The function `name` that the source defines; `names` are its globals. It is compiled when it is called."""

    def compiled(*arguments: Any, **named: Any) -> Any:
        made: dict[str, Any] = {}
        exec(source, names, made)
        function.__code__, function.__defaults__ = made[name].__code__, made[name].__defaults__
        function.__kwdefaults__ = made[name].__kwdefaults__
        return function(*arguments, **named)

    function = FunctionType(_first_call.__code__, names, name)
    function.__kwdefaults__ = {"_compiled": compiled}
    return function


def _first_call(*arguments: Any, _compiled: Callable[..., Any], **named: Any) -> Any:
    return _compiled(*arguments, **named)
