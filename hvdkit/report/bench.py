"""The result of `hvdkit bench` as a table, as lines and as `bench.png`."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table

from hvdkit.report import plotting
from hvdkit.results.bench import Bench, BenchRow
from hvdkit.simulator.cluster import Measured
from hvdkit.simulator.piecewise_linear import of_pieces

_NO_RATE = 1e11  # Mbit/s: the time does not grow with the size
_COLUMNS = {
    "size": "B", "count": "", "type": "", "redop": "", "time": "us", "algbw": "Mbit/s", "busbw": "Mbit/s", "#wrong": "",
    "p50": "us", "p95": "us", "p99": "us", "repeats": "", "of link": "",
}  # fmt: skip


def bench_table(bench: Bench) -> Table:
    """For the terminal: the columns of nccl-tests, percentiles and, if the link's rate is known, the share of it."""
    hosts = len(set(bench.hosts))
    title = f"{bench.collective}: {bench.framework} {bench.framework_version}, {bench.np} ranks on {hosts} host(s)"
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for heading, unit in _COLUMNS.items():
        if heading != "of link" or bench.link_mbit_per_s:
            left = heading in ("type", "redop")
            table.add_column(f"{heading}\n{unit}", justify="left" if left else "right", no_wrap=True)
    for row in bench.rows:
        cells = [str(row.size_bytes), str(row.count), row.dtype, row.redop, f"{row.time_us:.1f}"]
        cells += [f"{row.algbw_mbit_per_s:.3g}", f"{row.busbw_mbit_per_s:.3g}", str(row.wrong)]
        cells += [*(f"{value:.1f}" for value in (row.p50_us, row.p95_us, row.p99_us)), str(row.repeats)]
        table.add_row(*cells, *([] if row.of_link is None else [f"{row.of_link:.3f}"]))
    return table


def row_line(row: BenchRow) -> str:
    """One size in a line, printed as soon as it is measured."""
    share = "" if row.of_link is None else f", {row.of_link:.3f} of the link"
    wrong = f", {row.wrong} WRONG" if row.wrong else ""
    return f"{row.size_bytes} bytes: {row.p50_us:.0f} us, bus {row.busbw_mbit_per_s:.1f} Mbit/s{share}{wrong}"


def fit_lines(fit: Measured) -> list[str]:
    """A line for each piece of the fit, and one for its residual."""
    lines = []
    for piece in fit.pieces:
        rate = f" and {piece.mbit_per_s:.4g} Mbit/s" if piece.mbit_per_s < _NO_RATE else ""
        lines.append(f"cluster file, from {piece.from_bytes} bytes per rank on: {piece.latency_us:.0f} us{rate}")
    return [*lines, f"its uncertainty, from the fit and the spread of the repeats: {fit.residual_percent:.1f} %"]


def bench_plot(bench: Bench, fit: Measured, path: Path) -> None:
    """Draw latency and bus bandwidth by size, with the fit; written to `path` as PNG. Raises RunError."""
    share = bench.np if bench.collective == "allgather" else 1
    sizes, medians = [row.size_bytes for row in bench.rows], [row.p50_us for row in bench.rows]
    with plotting.picture(path, 13, 5) as figure:
        left, right = figure.subplots(1, 2)
        left.plot(sizes, medians, "o-", label="median")
        late = [row.p99_us for row in bench.rows]
        left.fill_between(sizes, medians, late, alpha=0.2, label="to the 99th percentile")
        fitted = [1e6 * of_pieces(fit.pieces)(size // share) for size in sizes]
        left.plot(sizes, fitted, "k--", lw=1, label="fit")
        plotting.logarithmic(left, "x", "y")
        left.set(xlabel="size, bytes", title="time of the slowest rank, µs")
        right.plot(sizes, [row.busbw_mbit_per_s for row in bench.rows], "o-")
        if bench.link_mbit_per_s:
            right.axhline(bench.link_mbit_per_s, color="black", lw=1, label="the link")
            right.legend()
        plotting.logarithmic(right, "x")
        right.set(xlabel="size, bytes", title="bus bandwidth, Mbit/s")
        right.set_ylim(bottom=0)
        left.legend()
        for axes in (left, right):
            axes.grid(alpha=0.3)
        figure.suptitle(f"{bench.collective}, {bench.framework} {bench.framework_version}, {bench.np} ranks")
        figure.tight_layout()
