"""The command `hvdkit bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hvdkit.cli import completion
from hvdkit.cli.options import Framework, Hosts, Launcher, Overwrite, Ranks, StallTimeout, show, warn
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
    from hvdkit import paths
    from hvdkit.commands import bench as bench_
    from hvdkit.launch.placement import Placement
    from hvdkit.report.bench import bench_plot, bench_table, fit_lines, row_line

    placement = Placement(np, hosts, launcher, stall_timeout)
    plan = bench_.plan(
        collective, framework, placement, min_bytes, max_bytes, factor, dtype, redop, seconds, device, link_mbit_per_s,
        add_to,
    )  # fmt: skip
    with paths.claimed(out or paths.default_out(collective, "bench"), overwrite, inputs=[add_to]) as folder:
        warn([] if device == "gpu" or plan.runtime.gpu else placement.crowding)
        result = bench_.run(plan, folder, lambda row: typer.echo(row_line(row), err=True))
        fit = bench_.measured(result)
        bench_plot(result, fit, folder / "bench.png")
        show([bench_table(result)], 160)
        typer.echo("\n".join([*fit_lines(fit), f"written to {folder / 'bench.json'}, .csv and .png, and cluster.yaml"]))
    raise typer.Exit(1 if any(row.wrong for row in result.rows) else 0)
