"""What is said of words that typer refuses, in place of its box: a line, with what may have been meant."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdkit.commands import COMMANDS

# What typer calls a wrong value, and what is expected.
_NUMBERS = {"valid integer": "a whole number", "valid float": "a number", "valid number": "a number"}


def lines(error: Any, words: Sequence[str]) -> list[str]:
    """The lines for an error of typer's about the words of a command line."""
    kind, context = type(error).__name__, getattr(error, "ctx", None)
    if kind == "NoArgsIsHelpError":  # the help is printed
        return []
    parameters = context.command.params if context else []
    script = next((word for word in words if word.endswith(".py")), None)
    if kind == "NoSuchOption" and script and context and context.command.name == "submit":
        return [f"{error.option_name}: no option of `hvdkit submit`; those of {script} follow it after `-- {script}`"]
    if kind == "NoSuchOption" and context and any(parameter.name == "overrides" for parameter in parameters):
        from hvdkit.recipe.hints import as_overrides
        from hvdkit.recipe.schema import Recipe

        known = {*context.help_option_names, *(option for parameter in parameters for option in parameter.opts)}
        if message := as_overrides(words, known, Recipe):
            return message.splitlines()
    if kind == "NoSuchOption" and context and context.command.name == "launch":
        from hvdkit.commands.launch import option_of_horovodrun

        if instead := option_of_horovodrun(error.option_name):
            return [f"{error.option_name}: an option of horovodrun; here {instead}"]
    said = " ".join(error.format_message().split()).removesuffix(".")
    if said.startswith("Invalid value for"):
        said = _of_value(error, words)
    # An option without its value has no context.
    command = next((name for name in COMMANDS if name.split() == list(words[: len(name.split())])), "")
    return [f"{said}; see `{context.command_path if context else f'hvdkit {command}'.strip()} --help`"]


def _of_value(error: Any, words: Sequence[str]) -> str:
    """What is wrong with an option's value, with the option and the value as they were given."""
    name, value = error.param.opts[0], ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        option, equals, after = word.partition("=")
        if option in error.param.opts:
            name, value = option, f" {after if equals else following}"
    why = next((f"expected {expected}" for kind, expected in _NUMBERS.items() if kind in error.message), None)
    return f"{name}{value}: {why or error.message.rstrip('.').replace('Input should be', 'expected')}"
