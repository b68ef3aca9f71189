"""What lies in a folder that `hvdkit compare` or `hvdkit train` has left, read and checked, nothing computed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from hvdkit import config
from hvdkit.config import Recipe
from hvdkit.errors import RequestError
from hvdkit.results import Comparison, MetricLine, TrainResult, read_comparison, read_result


@dataclass(frozen=True)
class Run:
    """One run: its result and what its folder holds beside it.

    `lines` are those of metrics.jsonl that could be read and `unread` counts the others; `recipe` is the resolved one
    in the file `config`. Both are empty where the folder is gone.
    """

    result: TrainResult
    lines: list[MetricLine]
    unread: int = 0
    config: Path | None = None
    recipe: Recipe | None = None


@dataclass(frozen=True)
class Found:
    """A folder's runs, in the order in which they ran; `comparison` is None where the folder is one run's."""

    folder: Path
    runs: list[Run]
    comparison: Comparison | None


def read(folder: Path) -> Found:
    """Read all that a report is made from. Raises RequestError with the first thing that is missing or damaged."""
    expected = "expected a folder that `hvdkit compare` or `hvdkit train` has written"
    try:
        names = {path.name for path in folder.iterdir()}
    except FileNotFoundError:
        raise RequestError(f"{_shown(folder)}: no such folder; {expected}") from None
    except NotADirectoryError:
        raise RequestError(f"{_shown(folder)}: is a file; {expected}") from None
    except OSError as error:
        raise RequestError(f"{_shown(folder)}: cannot be read ({error.strerror}); {expected}") from None
    if "compare.json" in names:
        return _comparison(folder)
    if "result.json" in names:
        return Found(folder, [_run(folder, _sound(read_result(folder / "result.json"), folder / "result.json"))], None)
    if "runs" in names:
        raise RequestError(f"{_shown(folder)}: a comparison that has not come to its end (no compare.json); {expected}")
    if not names:
        raise RequestError(f"{_shown(folder)}: the folder is empty; {expected}")
    raise RequestError(f"{_shown(folder)}: neither compare.json nor result.json is in it; {expected}")


def _comparison(folder: Path) -> Found:
    path = folder / "compare.json"
    comparison = read_comparison(path)
    places = {}
    for place in sorted((folder / "runs").glob("*/result.json")):
        places[_key(read_result(place))] = place.parent
    runs = []
    for result in comparison.runs:
        home = places.get(_key(_sound(result, path)))
        runs.append(_run(home, result) if home else Run(result, []))
    return Found(folder, runs, comparison)


def _key(result: TrainResult) -> tuple[object, ...]:
    """What tells a comparison's runs from each other; the digest makes sure that a folder is of this comparison."""
    return (result.framework, result.np, result.rival, result.round, result.final_weights_sha256)


def _sound(result: TrainResult, path: Path) -> TrainResult:
    """Refuse figures that no run can have, which the types let pass."""
    positive = {
        "np": result.np,
        "batch_size": result.batch_size,
        "epochs": result.epochs,
        "images_per_second": result.images_per_second,
    }
    for name, value in positive.items():
        if not (math.isfinite(value) and value > 0):
            raise RequestError(f"{path}: damaged: {name}: expected a number above 0, got {value}")
    return result


def _run(folder: Path, result: TrainResult) -> Run:
    lines, unread = [], 0
    try:
        for text in (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                lines.append(MetricLine.model_validate_json(text))
            except ValidationError:
                unread += 1
    except OSError:
        pass  # the page says that there are no curves
    path = folder / "config.yaml"
    try:
        return Run(result, lines, unread, path, config.load(path))
    except RequestError:
        return Run(result, lines, unread)  # started without hvdkit's command line, or by another version of it


def _shown(path: Path) -> str:
    """A path in a message of one line."""
    text = str(path)
    return text if text.isprintable() else repr(text)
