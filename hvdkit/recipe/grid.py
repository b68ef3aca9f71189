"""A grid of values on the command line, such as `--sweep n=8,16,...,1024`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hvdkit.errors import RequestError
from hvdkit.recipe import yaml_files

Grid = Mapping[str, Sequence[Any]]  # values by key

MOST = 100_000  # points of a grid
_DOTS = ("...", "…")


def read(texts: Sequence[str], option: str, root: Any = None) -> dict[str, list[Any]]:
    """The grid in texts such as `n=8,16,...,1024`, by key. Dots lead to the last as the two values before them do.

    `root` is the pydantic class that has the keys: where it expects a text, a value is the word as it is written.
    Raises RequestError with a line for each fault, which begins with the `option`.
    """
    grid: dict[str, list[Any]] = {}
    faults = []
    for text in texts:
        key, equals, values = text.partition("=")
        try:
            if not equals or not key.strip():
                raise ValueError("expected KEY=VALUE,VALUE,..., such as batch_size=32,64")
            if key in grid:
                raise ValueError("given twice; expected all values of a key together")
            grid[key] = _filled(_listed(values, root, key.strip()))
        except ValueError as error:
            faults.append(f"{option} {text if text.isprintable() else repr(text)}: {error}")
    if faults:
        raise RequestError("\n".join(faults))
    return grid


def _listed(text: str, root: Any, key: str) -> list[Any]:
    """The values in a text, as in a YAML list."""
    for dots in _DOTS:
        text = text.replace(dots, f'"{_DOTS[0]}"')
    try:
        values = yaml_files.parse(f"[{text}]", "", root, key)
    except RequestError:
        raise ValueError("expected values with commas between them, such as 32,64") from None
    if any(value is None for value in values):
        raise ValueError("expected a value after each comma")
    return list(values)


def _filled(values: list[Any]) -> list[Any]:
    """The values, with those that dots stand for: a geometric series if the ratio leads to the last, else a sum."""
    if _DOTS[0] not in values:
        return values
    at = values.index(_DOTS[0])
    known = values[:at][-2:] + values[at + 1 :][:1]
    if len(known) < 3 or at + 2 != len(values) or any(type(value) not in (int, float) for value in known):
        raise ValueError("expected two numbers before ... and one after, such as 8,16,...,1024")
    first, second, last = known
    ratio = second / first if first > 0 and second != first else 1.0
    steps = math.log(last / second) / math.log(ratio) if ratio > 0 and ratio != 1 and last > 0 else 0.0
    if steps > 0.5 and abs(steps - round(steps)) < 1e-6:
        between = [second * ratio**i for i in range(1, round(steps))]
        integers = all(type(value) is int for value in known)
        return [*values[:at], *(round(value) if integers else float(f"{value:.12g}") for value in between), last]
    step = second - first
    steps = (last - second) / step if step else 0.0
    if not 0.5 < steps <= MOST or abs(steps - round(steps)) > 1e-6:
        raise ValueError(f"{first}, {second} lead to {last} neither by the same factor nor by the same difference")
    return [*values[:at], *(second + step * i for i in range(1, round(steps))), last]
