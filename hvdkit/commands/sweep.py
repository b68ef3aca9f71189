"""`hvdkit predict --sweep`: a grid of what-ifs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from rich.table import Table

from hvdkit import paths
from hvdkit.commands import predict
from hvdkit.commands.fields import Overwrite, texts
from hvdkit.commands.predict import ClusterFile, Out, Policy, ProfileFile, WhatIf
from hvdkit.commands.request import Accepts, Option, Request
from hvdkit.recipe import grid as grids
from hvdkit.report import csv_files
from hvdkit.report import sweep as report
from hvdkit.report.tabular import terminal
from hvdkit.simulator import calibration
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import sweep as sweeping
from hvdkit.simulator.sweep import Sweep


def _grid(name: str, given: Any) -> Any:
    return dict(given) if isinstance(given, Mapping) else grids.read(texts(name, given), "--sweep")


class SweepRequest(Request):
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
    policy: Policy = None
    settings: WhatIf = None
    out: Out = None
    overwrite: Overwrite = False


def run(request: SweepRequest) -> Sweep:
    """Predict. Raises RequestError with file, key and what was expected; RunError where nothing can be written."""
    profile, links = predict.read(request.profile), clusters.load(request.cluster)
    whatifs = sweeping.checked(request.grid, request.ranks or [], request.settings or [], request.policy, links)
    calibration.calibrate(profile)
    target = request.out or paths.default_out("sweep", "predict")
    with paths.claimed(target, request.overwrite, inputs=[request.profile, request.cluster]) as folder:
        swept = sweeping.sweep(profile, links, whatifs)
        swept.written(folder)
        csv_files.save(folder / "sweep.csv", report.rows(swept))
        report.picture(swept, folder / "sweep.png")
        return swept


def lines(request: SweepRequest, result: Sweep) -> Iterator[str | Table]:
    """A row for each what-if."""
    yield terminal(report.table(result), "")
    yield from report.lines(result)
    yield f"written to {result.folder / 'sweep.json'}, sweep.csv and sweep.png"
