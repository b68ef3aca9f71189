"""The CSV files beside the JSON files: the same figures as rows, for spreadsheets and data frames.

A column is named by its key in the JSON file, with dots where keys are nested. A value that is missing or null is an
empty cell, true and false are written as in JSON, and the parts of a list are separated by semicolons.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdkit.files import atomic
from hvdkit.results.json_files import flat

if TYPE_CHECKING:  # each command loads its own
    from hvdkit.results.compare import Comparison, Ratio
    from hvdkit.results.profile import Profile, StepSplit
    from hvdkit.results.train import MetricLine

Row = Mapping[str, Any]
# The figures of a run of which compare.csv has the median over the rounds and its interval.
_FIGURES = (
    "images_per_second", "step_ms_p50", "step_ms_p90", "step_ms_p99", "cpu_s_per_image", "startup_s", "train_loss",
    "val_accuracy", "val_loss", "peak_rss_mib", "bytes_per_step", "communication_mbit_per_s", "load",
    "samples_per_second", "tokens_per_second", "model_flop_per_second",
)  # fmt: skip
# The columns of metrics.csv before there is a line; those of the task's metrics come after them.
_METRICS = (
    "step", "total_steps", "epoch", "ends_epoch", "loss", "learning_rate", "images_per_second", "bytes_per_step",
    "rss_mib", "communication_mbit_per_s", "val_accuracy", "val_loss", "unit", "warnings",
)  # fmt: skip


def save(path: Path, rows: Callable[[], Iterable[Row]] | Iterable[Row], first: Sequence[str] = ()) -> None:
    """Write rows below a line of column names: `first`, then the others in the order in which rows have them first.

    Where there may be millions, `rows` begins to read them; it is called twice. Without rows and columns there is no
    file. Raises RunError if it cannot be written.
    """
    begin = rows if callable(rows) else list(rows).__iter__
    columns = list(dict.fromkeys([*first, *(column for row in begin() for column in flat(row))]))
    if not columns:
        path.unlink(missing_ok=True)
        return
    with atomic(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(columns)
        for row in map(flat, begin()):
            writer.writerow([_cell(row.get(column)) for column in columns])
        text.detach()  # flushed; `atomic` closes the file


def save_metrics(path: Path, lines: Callable[[], Iterable[MetricLine]]) -> None:
    """Write a row for each line of metrics.jsonl, of which `lines` begins to read. Raises RunError."""
    save(path, lambda: (line.row() for line in lines()), _METRICS)


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return "; ".join(map(str, value)) if isinstance(value, list) else value


def comparison(result: Comparison) -> list[Row]:
    """A row for each framework, number of ranks and rival, with medians over the rounds and their intervals.

    `efficiency` is of hvdkit's own runs, `ratio` (hvdkit ÷ rival) of a rival's.
    """
    from hvdkit.report.collect import Run
    from hvdkit.report.rounds import by_kind, interval, own_metrics

    def spread(values: tuple[float, ...]) -> Row:
        estimate = interval(values) if values else None
        return {
            "median": estimate and estimate.middle,
            "low": estimate and estimate.low,
            "high": estimate and estimate.high,
        }

    def of_ratio(ratio: Ratio | None, *keys: str) -> Row:
        return {key: getattr(ratio, key, None) for key in ("median", "low", "high", *keys)}

    ratios = {(row.framework, row.np, "" if row.of_scaling else row.against): row for row in result.ratios}
    rows: list[Row] = []
    for group in by_kind(map(Run, result.runs)).values():
        alone = ratios.get((group.framework, group.np, "")) if group.rival is None else None
        against = ratios.get((group.framework, group.np, group.rival)) if group.rival else None
        rows.append(
            {
                **{key: getattr(group.first, key) for key in ("recipe", "model", "framework", "framework_version")},
                "np": group.np,
                "rival": group.rival,
                "batch_size": group.first.batch_size,
                "rounds": len(group.runs),
                **{key: spread(group.values(key)) for key in _FIGURES},
                "unit": group.first.unit,
                "validation": {name: spread(group.values(name, True)) for name in own_metrics(group.runs)},
                "noisy_rounds": sum(run.result.noisy for run in group.runs),
                "efficiency": of_ratio(alone),
                "ratio": of_ratio(against, "verdict"),
            }
        )
    return rows


def profile(result: Profile) -> list[Row]:
    """A row for each part of a step: first the means over the ranks, without a rank, then those of each rank."""

    def parts(split: StepSplit, **of: Any) -> list[Row]:
        return [
            {**of, "part": key.removesuffix("_ms"), **{f"{name}_ms": value for name, value in spread.items()}}
            for key, spread in split.model_dump().items()
            if spread is not None
        ]

    ranks = [row for rank in result.ranks for row in parts(rank.split, rank=rank.rank, host=rank.host)]
    return [*parts(result.step, rank=None, host=None), *ranks]
