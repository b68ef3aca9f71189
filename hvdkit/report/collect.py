"""Reads and checks the results in a folder of `hvdkit compare` or `hvdkit train`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from hvdkit.errors import RequestError
from hvdkit.paths import settled
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.recipe.yaml_files import named
from hvdkit.results.compare import Comparison
from hvdkit.results.train import MetricLine, TrainResult, scan_metrics

_MOST_LINES = 400  # a run of each kind, which charts draw
_MOST_KINDS, _MOST_NPS = 200, 32  # of runs, on one page
Kind = tuple[str, int, str | None]  # framework, number of ranks, rival


@dataclass(frozen=True)
class Run:
    """One run: its result and the other files of its folder.

    `lines` are the readable ones of metrics.jsonl (a sample of them if there are many), `unread` counts the others.
    `recipe` is the resolved recipe in the file `config`. They are empty if the folder is missing.
    """

    result: TrainResult
    lines: list[MetricLine] = field(default_factory=list)
    unread: int = 0
    config: Path | None = None
    recipe: Recipe | None = None

    @property
    def kind(self) -> Kind:
        """What it has in common with the same run in other rounds."""
        return self.result.framework, self.result.np, self.result.rival


@dataclass(frozen=True)
class CollectedRuns:
    """The runs of a folder, in the order of compare.json; `comparison` is None for the folder of a single run."""

    folder: Path
    runs: list[Run]
    comparison: Comparison | None


def read(folder: Path) -> CollectedRuns:
    """Read what a report is made from. Raises RequestError with the first file that is missing or damaged."""
    expected = "expected a folder that `hvdkit compare` or `hvdkit train` has written"
    try:
        names = {path.name for path in settled(folder).iterdir()}
    except OSError as error:
        reasons: dict[type[OSError], str] = {FileNotFoundError: "no such folder", NotADirectoryError: "is a file"}
        reason = reasons.get(type(error), f"cannot be read ({error.strerror})")
        raise RequestError(f"{named(folder)}: {reason}; {expected}") from None
    if "compare.json" in names:
        return _comparison(folder)
    if "result.json" in names:
        path = folder / "result.json"
        return CollectedRuns(folder, [_run(folder, _sound(TrainResult.read(path), path))], None)
    reason = "neither compare.json nor result.json is in it" if names else "the folder is empty"
    if "runs" in names:
        reason = "a comparison that has not ended (no compare.json)"
    raise RequestError(f"{named(folder)}: {reason}; {expected}")


def _comparison(folder: Path) -> CollectedRuns:
    path = folder / "compare.json"
    comparison = Comparison.read(path)
    kinds = {Run(result).kind for result in comparison.runs}
    nps = {np for _, np, _ in kinds}
    for values, most, what in ((kinds, _MOST_KINDS, "kinds of runs"), (nps, _MOST_NPS, "numbers of ranks")):
        if len(values) > most:
            raise RequestError(f"{path}: expected at most {most} {what}, which a page can show, got {len(values)}")
    paths = sorted((folder / "runs").glob("*/result.json"))
    folders = {_key(TrainResult.read(result)): result.parent for result in paths}
    runs = []
    for result in comparison.runs:
        home = folders.get(_key(_sound(result, path)))
        runs.append(_run(home, result) if home else Run(result))
    return CollectedRuns(folder, runs, comparison)


def _key(result: TrainResult) -> tuple[object, ...]:
    """Identifies a run of a comparison; the digest makes sure that a folder belongs to this comparison."""
    return (*Run(result).kind, result.round, result.final_weights_sha256)


def _sound(result: TrainResult, path: Path) -> TrainResult:
    """Refuse impossible figures that the types allow."""
    for name in ("np", "batch_size", "epochs", "images_per_second"):
        value = getattr(result, name)
        if not result.measured_steps and not result.images_per_second:
            raise RequestError(f"{path}: made anew without metrics.jsonl, so no speed is known; train longer for one")
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
    for number, (_, line) in enumerate(scan_metrics(path)):
        if line is None:
            unread += 1
            continue
        (ends if line.ends_epoch else steps).add(number, line)
    return [line for _, line in sorted((steps.kept | steps.last | ends.kept | ends.last).items())], unread


class _Sample:
    """At most _MOST_LINES lines of a series of any length by their numbers, evenly spaced, and the last one."""

    def __init__(self) -> None:
        self.kept: dict[int, MetricLine] = {}
        self.last: dict[int, MetricLine] = {}
        self._seen, self._stride = 0, 1

    def add(self, number: int, line: MetricLine) -> None:
        self.last = {number: line}
        if self._seen % self._stride == 0:
            self.kept |= self.last
            if len(self.kept) > _MOST_LINES:
                self.kept, self._stride = dict(list(self.kept.items())[::2]), 2 * self._stride
        self._seen += 1
