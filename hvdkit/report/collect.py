"""Reads and checks the results in a folder of `hvdkit compare` or `hvdkit train`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from hvdkit.errors import RequestError
from hvdkit.files import open_regular
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.recipe.yaml_files import named
from hvdkit.results.compare import Comparison, read_comparison
from hvdkit.results.train import MetricLine, TrainResult, read_result

_MOST_KEPT = 4000  # lines a run of each kind; charts draw a tenth of them
_MOST_KINDS, _MOST_NPS = 200, 32  # of runs, on one page
_LONGEST_LINE = 65536  # bytes; one has a few hundred


@dataclass(frozen=True)
class Run:
    """One run: its result and the other files of its folder.

    `lines` are the readable ones of metrics.jsonl (a sample of them if there are many), `unread` counts the others.
    `recipe` is the resolved recipe in the file `config`. They are empty if the folder is missing.
    """

    result: TrainResult
    lines: list[MetricLine]
    unread: int = 0
    config: Path | None = None
    recipe: Recipe | None = None


@dataclass(frozen=True)
class Found:
    """The runs of a folder, in the order of compare.json; `comparison` is None for the folder of a single run."""

    folder: Path
    runs: list[Run]
    comparison: Comparison | None


def read(folder: Path) -> Found:
    """Read what a report is made from. Raises RequestError with the first file that is missing or damaged."""
    expected = "expected a folder that `hvdkit compare` or `hvdkit train` has written"
    try:
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        reasons: dict[type[OSError], str] = {FileNotFoundError: "no such folder", NotADirectoryError: "is a file"}
        reason = reasons.get(type(error), f"cannot be read ({error.strerror})")
        raise RequestError(f"{named(folder)}: {reason}; {expected}") from None
    if "compare.json" in names:
        return _comparison(folder)
    if "result.json" in names:
        return Found(folder, [_run(folder, _sound(read_result(folder / "result.json"), folder / "result.json"))], None)
    reason = "neither compare.json nor result.json is in it" if names else "the folder is empty"
    if "runs" in names:
        reason = "a comparison that has not come to its end (no compare.json)"
    raise RequestError(f"{named(folder)}: {reason}; {expected}")


def _comparison(folder: Path) -> Found:
    path = folder / "compare.json"
    comparison = read_comparison(path)
    _fits_a_page(comparison, path)
    places = sorted((folder / "runs").glob("*/result.json"))
    folders = {_key(read_result(place)): place.parent for place in places}
    runs = []
    for result in comparison.runs:
        home = folders.get(_key(_sound(result, path)))
        runs.append(_run(home, result) if home else Run(result, []))
    return Found(folder, runs, comparison)


def _fits_a_page(comparison: Comparison, path: Path) -> None:
    kinds = len({(result.framework, result.np, result.rival) for result in comparison.runs})
    nps = len({result.np for result in comparison.runs})
    for found, most, what in ((kinds, _MOST_KINDS, "kinds of runs"), (nps, _MOST_NPS, "numbers of ranks")):
        if found > most:
            raise RequestError(f"{path}: expected at most {most} {what}, which a page can show, got {found}")


def _key(result: TrainResult) -> tuple[object, ...]:
    """Identifies a run of a comparison; the digest makes sure that a folder belongs to this comparison."""
    return (result.framework, result.np, result.rival, result.round, result.final_weights_sha256)


def _sound(result: TrainResult, path: Path) -> TrainResult:
    """Refuse impossible figures that the types allow."""
    for name in ("np", "batch_size", "epochs", "images_per_second"):
        value = getattr(result, name)
        if not (math.isfinite(value) and value > 0):
            raise RequestError(f"{path}: damaged: {name}: expected a number above 0, got {value}")
    return result


def _run(folder: Path, result: TrainResult) -> Run:
    try:
        lines, unread = _lines(folder / "metrics.jsonl")
    except OSError:
        lines, unread = [], 0  # the page notes that there are no curves
    path = folder / "config.yaml"
    try:
        return Run(result, lines, unread, path, schema.load(path))
    except RequestError:
        return Run(result, lines, unread)  # of a recipe script run without hvdkit, or of another version


def _lines(path: Path) -> tuple[list[MetricLine], int]:
    """The lines of a metrics.jsonl (a sample of a long file), and how many could not be read.

    The memory that it takes does not grow with the file. Raises OSError.
    """
    steps, ends, unread = _Sample(), _Sample(), 0
    with open_regular(path) as file:
        for number, text in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b"")):
            try:
                line = MetricLine.model_validate_json(text)
            except ValidationError:
                unread += 1
                continue
            (ends if line.ends_epoch else steps).add(number, line)
    return [line for _, line in sorted(steps.kept() + ends.kept(), key=lambda each: each[0])], unread


class _Sample:
    """At most _MOST_KEPT lines of a series of any length, with their numbers: evenly spaced, and the last one."""

    def __init__(self) -> None:
        self._lines: list[tuple[int, MetricLine]] = []
        self._seen, self._stride = 0, 1
        self._last: tuple[int, MetricLine] | None = None

    def add(self, place: int, line: MetricLine) -> None:
        self._last = (place, line)
        if self._seen % self._stride == 0:
            if len(self._lines) == _MOST_KEPT - 1:
                self._lines, self._stride = self._lines[::2], 2 * self._stride
            if self._seen % self._stride == 0:
                self._lines.append(self._last)
        self._seen += 1

    def kept(self) -> list[tuple[int, MetricLine]]:
        if self._last is None or self._lines[-1] is self._last:
            return self._lines
        return [*self._lines, self._last]
