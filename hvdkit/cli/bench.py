"""The command `hvdkit bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli import completion
from hvdkit.cli.options import Framework, Hosts, Launcher, Overwrite, Ranks, StallTimeout, show
from hvdkit.defaults import FRAMEWORK, LAUNCHER, STALL_TIMEOUT_S

Out = Annotated[
    Path | None, typer.Option(help="the folder to write into", show_default="runs/<collective>-bench-<time>")
]


def bench(
    collective: Annotated[
        str,
        typer.Argument(
            help="allreduce, allgather, broadcast, alltoall or reducescatter", autocompletion=completion.collectives
        ),
    ],
    framework: Framework = FRAMEWORK,
    np: Ranks = 2,
    hosts: Hosts = None,
    min_bytes: Annotated[int, typer.Option(help="the smallest size")] = 4,
    max_bytes: Annotated[int, typer.Option(help="the largest size")] = 64 * 2**20,
    factor: Annotated[float, typer.Option(help="ratio of each size to the one before")] = 4.0,
    dtype: Annotated[str, typer.Option(help="float16, float32, float64, int32, int64, uint8 or int8")] = "float32",
    redop: Annotated[str, typer.Option(help="sum, average, min or max")] = "sum",
    seconds: Annotated[float, typer.Option(help="seconds to spend on a size, with at least 3 repeats")] = 2.0,
    device: Annotated[str, typer.Option(help="auto, cpu or gpu")] = "auto",
    link_mbit_per_s: Annotated[float | None, typer.Option(help="the link's rate, to show the share of it")] = None,
    add_to: Annotated[Path | None, typer.Option(help="a cluster file to add the result to, in a new file")] = None,
    launcher: Launcher = LAUNCHER,
    stall_timeout: StallTimeout = STALL_TIMEOUT_S,
    out: Out = None,
    overwrite: Overwrite = False,
) -> None:
    """Time a collective by size, check each element, and write a cluster file for `hvdkit predict`."""
    from hvdkit import api
    from hvdkit.commands.bench import measured
    from hvdkit.report.bench import bench_table, fit_lines

    result = api.bench(
        collective, framework=framework, np=np, hosts=hosts, min_bytes=min_bytes, max_bytes=max_bytes, factor=factor,
        dtype=dtype, redop=redop, seconds=seconds, device=device, link_mbit_per_s=link_mbit_per_s, add_to=add_to,
        launcher=launcher, stall_timeout=stall_timeout, out=out, overwrite=overwrite,
    )  # fmt: skip
    show([bench_table(result)], 160)
    written = f"written to {result.folder / 'bench.json'}, .csv and .png, and cluster.yaml"
    typer.echo("\n".join([*fit_lines(measured(result)), written]))
    raise typer.Exit(1 if any(row.wrong for row in result.rows) else 0)
