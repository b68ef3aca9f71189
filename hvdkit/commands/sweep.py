"""`hvdkit predict --sweep`: a grid of what-ifs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from hvdkit import paths
from hvdkit.commands import predict
from hvdkit.commands.fields import texts
from hvdkit.commands.predict import AsksWhatIf, ClusterFile, ProfileFile
from hvdkit.commands.request import Accepts, Option
from hvdkit.recipe import grid as grids
from hvdkit.report import csv_files, plotting
from hvdkit.report.tabular import Cell, Table, number, percent, terminal
from hvdkit.simulator import calibration
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import sweep as sweeping
from hvdkit.simulator.sweep import RANKS, Row, Sweep

_SHOWN = 30  # rows on the terminal
_LINES = 8  # of the picture


def _grid(name: str, given: Any) -> Any:
    return dict(given) if isinstance(given, Mapping) else grids.read(texts(name, given), "--sweep")


class SweepRequest(AsksWhatIf):
    """Predict a grid of what-ifs, such as `{"n": [8, 16, 32], "batch_size": [32, 64]}`, or `["n=8,16,...,1024"]`.

    `n` is the number of ranks, which `ranks` may say instead; the other keys are those of `predict`'s `settings`.
    """

    profile: ProfileFile
    grid: Annotated[
        dict[str, Any],
        Accepts("Settings", "a dictionary, or a list of key=value", _grid, list[str]),
        Option(
            "a grid of what-ifs, such as n=8,16,...,1024; may be repeated",
            ("--sweep",),
            metavar="KEY=V,V,...",
            positional=True,
        ),
    ]
    cluster: ClusterFile
    ranks: Annotated[
        list[int] | None, Option("number of ranks; may be repeated", ("-n", "-np", "--np"), shown="--sweep n=…")
    ] = None


def run(request: SweepRequest) -> Sweep:
    """Predict. Raises RequestError with file, key and what was expected; RunError where nothing can be written."""
    profile, links = predict.read(request.profile), clusters.load(request.cluster)
    whatifs = sweeping.checked(request.grid, request.ranks or [], predict.what_ifs(request), request.policy, links)
    calibration.calibrate(profile)
    target = request.out or paths.default_out("sweep", "predict")
    with paths.claimed(target, request.overwrite, inputs=[request.profile, request.cluster]) as folder:
        swept = sweeping.sweep(profile, links, whatifs)
        swept.written(folder)
        csv_files.save(folder / "sweep.csv", _rows(swept))
        _picture(swept, folder / "sweep.png")
        return swept


def lines(request: SweepRequest, result: Sweep) -> Iterator[Any]:
    """A row for each what-if."""
    yield terminal(_table(result), "")
    yield from _said(result)
    yield f"written to {result.folder / 'sweep.json'}, sweep.csv and sweep.png"


def _table(swept: Sweep) -> Table:
    """All what-ifs, or those with the highest speed if there are many."""
    rows = swept.rows
    if len(rows) > _SHOWN:
        rows = sorted(rows, key=lambda row: -row.images_per_second)[:_SHOWN]
    columns: dict[str, Any] = {key: lambda row, key=key: Cell(_text(row.what[key])) for key in swept.rows[0].what}
    money = f"{swept.currency}/million {swept.unit}"
    every_column = Table.of(
        "sweep",
        rows,
        columns
        | {
            "ms/step": lambda row: number(row.step_ms, 1),
            "from": lambda row: number(row.low_ms, 1),
            "to": lambda row: number(row.high_ms, 1),
            f"{swept.unit}/s": lambda row: number(row.images_per_second),
            "efficiency": lambda row: percent(row.efficiency),
            money: lambda row: number(row.cost_per_million_images, 2),
        },
    )
    return every_column.without_empty([money])


def _said(swept: Sweep) -> list[str]:
    """What was predicted from what, and the notes."""
    left = len(swept.rows) - _SHOWN
    said = [f"{swept.model} on {swept.cluster}, from a profile of {swept.profile}"]
    said += [f"the {_SHOWN} fastest of {len(swept.rows)} what-ifs; all are in sweep.csv"] if left > 0 else []
    said += [f"{count} what-ifs left out: {reason}" for reason, count in swept.left_out.items()]
    return said + [f"note ({count} of {len(swept.rows)}): {note}" for note, count in swept.notes.items()]


def _rows(swept: Sweep) -> Iterable[dict[str, Any]]:
    """Rows for sweep.csv: a column for each swept key."""
    for row in swept.rows:
        what = {f"set.{key}": _text(value) for key, value in row.what.items()}
        yield what | row.model_dump(exclude={"what"})


def _text(value: Any) -> str:
    """A value as `--set` takes it."""
    return value if isinstance(value, str) else json.dumps(value)


def _picture(swept: Sweep, path: Path) -> None:
    """Draw speeds over the number of ranks, or over the key with the most values, a line for each value of
    the key with the next most; of all other keys the fastest values count. Written to `path` as PNG. Raises RunError.
    """
    values = {key: list(dict.fromkeys(_text(row.what[key]) for row in swept.rows)) for key in swept.rows[0].what}
    by_count = sorted(values, key=lambda key: (key == RANKS and len(values[key]) > 1, len(values[key])), reverse=True)
    across, other = by_count[0], by_count[1] if len(by_count) > 1 else None
    best: dict[str, dict[str, Row]] = {}
    for row in sorted(swept.rows, key=lambda row: row.images_per_second):
        best.setdefault(_text(row.what[other]) if other else "", {})[_text(row.what[across])] = row
    names = values[other] if other else [""]
    numbers = all(type(row.what[across]) in (int, float) and row.what[across] > 0 for row in swept.rows)
    with plotting.picture(path, 10, 6) as figure:
        axes = figure.subplots()
        for name in names[:: -(-len(names) // _LINES)]:
            rows = [best[name][value] for value in values[across] if value in best[name]]
            positions = [row.what[across] if numbers else _text(row.what[across]) for row in rows]
            axes.plot(positions, [row.images_per_second for row in rows], "o-", label=f"{other} {name}")
            low, high = ([row.images_per_second * row.step_ms / getattr(row, end) for row in rows]
                         for end in ("high_ms", "low_ms"))  # fmt: skip
            axes.fill_between(positions, low, high, alpha=0.15)
        if numbers and len(values[across]) > 2:
            axes.set(xscale="log", yscale="log")
            axes.set_xticks([float(value) for value in values[across]], values[across])
            axes.minorticks_off()
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        rest = [key for key in by_count[2:] if len(values[key]) > 1]
        fastest = f", the fastest {' and '.join(rest)}" if rest else ""
        title = f"{swept.model} on {swept.cluster}{fastest}"
        axes.set(xlabel="ranks" if across == RANKS else across, ylabel=f"{swept.unit}/s", title=title)
        axes.grid(alpha=0.3)
        if other:
            axes.legend()
        figure.tight_layout()
