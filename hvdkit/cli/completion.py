"""What a shell completes after an option or in place of an argument. Each list is loaded when it is asked for."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any


def asked() -> bool:
    """Whether a shell asks for completions, instead of a user for a command."""
    return any(name.endswith("_COMPLETE") and name.startswith("_") for name in os.environ) and len(sys.argv) == 1


def among(module: str, name: str) -> Callable[[str], list[str]]:
    """Completes names that a module lists."""
    return lambda incomplete: list(getattr(import_module(module), name))


def recipes(incomplete: str) -> list[str]:
    """Recipes that come with hvdkit, and YAML files."""
    from hvdkit import paths

    return _or_files(incomplete, (path.stem for path in paths.recipes().glob("*.yaml")))


def copies(incomplete: str) -> list[str]:
    """What `hvdkit recipes copy` copies."""
    return [*recipes(incomplete), *frameworks(incomplete)]


def clusters(incomplete: str) -> list[str]:
    """Clusters that hvdkit ships, and YAML files."""
    from hvdkit.simulator import cluster

    return _or_files(incomplete, cluster.shipped())


def devices(incomplete: str) -> list[str]:
    """Devices in hvdkit's cluster files."""
    from hvdkit.commands import memory

    return list(memory.devices())


def overrides(incomplete: str) -> list[str]:
    """Keys of a recipe as `key=`, and after the sign their values, as far as there is a list of them.

    A single key comes with its default too: bash puts a space after a single word.
    """
    from hvdkit.recipe.hints import values
    from hvdkit.recipe.schema import Recipe

    known = values(Recipe)
    key, sign, _ = incomplete.partition("=")
    if sign:
        return [f"{key}={value}" for value in known.get(key, [])]
    if (before := _before_the_sign()) is not None:
        return _OF_OPTIONS[before](incomplete) if before in _OF_OPTIONS else known.get(before, [])
    keys = [key for key in known if key.startswith(incomplete)]
    return [f"{key}=" for key in keys] + [f"{keys[0]}={value}" for value in known[keys[0]] if len(keys) == 1]


def _before_the_sign() -> str | None:
    """The key, where bash completes what comes after a `=`: it takes the sign for a word of its own."""
    words, at_word = _words()
    sign = next((at for at in (at_word, at_word - 1) if words[at : at + 1] == ["="]), 0)
    return words[sign - 1] if sign else None


frameworks = among("hvdkit.runtimes.pins", "FRAMEWORKS")
runtimes = among("hvdkit.runtimes.pins", "ALL")
rivals = among("hvdkit.baselines.registry", "RIVALS")
launchers = among("hvdkit.launch.launchers", "LAUNCHERS")
trackers = among("hvdkit.tracking.trackers", "NAMES")
collectives = among("hvdkit.results.bench", "COLLECTIVES")
_OF_OPTIONS = {"--framework": frameworks, "--rival": rivals, "--launcher": launchers, "--log": trackers}


def _words() -> tuple[list[str], int]:
    """The words of bash's command line as they were typed, one a line, and the place of the one to complete."""
    words = os.environ.get("COMP_WORDS", "")
    return words.split("\n") if "\n" in words else words.split(), int(os.environ.get("COMP_CWORD", 0))


class _Word(str):
    """What bash is given in place of what was typed: its signs have a backslash, which typer does not compare."""

    __slots__ = ("plain",)
    plain: str

    def startswith(self, *begins: Any) -> bool:
        return self.plain.startswith(*begins)


def _word(name: str) -> str:
    """A file's name as a shell wants it: bash puts it into the line as it is, also between quotes."""
    words, at_word = _words()
    if not words or "".join(words[at_word : at_word + 1])[:1] in ("'", '"'):
        return name
    word = _Word(re.sub(r"[^\w@%+=:,./~-]", r"\\\g<0>", name))
    word.plain = name
    return word


def _or_files(incomplete: str, names: Iterable[str]) -> list[str]:
    home = os.path.expanduser(incomplete)  # noqa: PTH111 - as it was typed, ./ and all
    files = glob.glob(f"{glob.escape(home)}*.yaml")  # noqa: PTH207
    return [*sorted(names), *(_word(incomplete + file[len(home) :]) for file in sorted(files) if file.isprintable())]
