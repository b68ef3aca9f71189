"""What adapters do so that a framework's import is short: functions that are compiled at their first call."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest

from hvdkit.adapters.loading import compiled_late

pytestmark = pytest.mark.check
MAKER = "def make(source, name):\n    made = {}\n    exec(source, None, made)\n    return made[name]\n"
SOURCE = '\ndef scaled(x, by=2, *, more=0, **others):\n    r"""Doc."""\n    return FACTOR * x * by + more + len(others)'


def module(name: str) -> Any:
    """A module that makes functions of source, as MXNet does."""
    made = ModuleType(name)
    vars(made)["FACTOR"] = 10
    exec(MAKER, vars(made))
    return made


def test_a_function_is_compiled_at_its_first_call() -> None:
    with compiled_late("frame"):
        scaled = module("frame.register").make(SOURCE, "scaled")
        scaled.__doc__ = "as the package sets it"
    assert scaled.__code__.co_varnames[0] != "x"
    assert scaled(3) == 60
    assert scaled(3, 1, more=5, other=0) == 36
    assert scaled.__doc__ == "as the package sets it"
    assert str(inspect.signature(scaled)) == "(x, by=2, *, more=0, **others)"
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        scaled()


def test_what_is_wrong_in_a_function_is_told_at_its_first_call() -> None:
    with compiled_late("frame"):
        broken = module("frame.register").make("def broken(x):\n    return (", "broken")
    for _ in range(2):
        with pytest.raises(SyntaxError):
            broken(1)


@pytest.mark.parametrize("name", ("framework.register", "other"))
def test_functions_of_other_packages_are_compiled_at_once(name: str) -> None:
    with compiled_late("frame"):
        scaled = module(name).make(SOURCE, "scaled")
    assert scaled.__code__.co_varnames[0] == "x"


def test_all_else_is_executed_as_always() -> None:
    before = exec
    with compiled_late(__name__.partition(".")[0]):
        names: dict[str, Any] = {}
        exec("number = 3\ndef late(): return number", names)
        assert names["late"]() == 3
        local = {"known": 1}
        exec("def more(): return 2", None, local)
        assert local["more"].__code__.co_argcount == 0 and local["more"].__code__.co_name == "more"
        exec("sys.hvdkit_was_here = 1")  # by the names of this function
        assert sys.__dict__.pop("hvdkit_was_here") == 1
    assert exec is before
