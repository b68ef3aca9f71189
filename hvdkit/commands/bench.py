"""`hvdkit bench`: how long a collective takes by size, and the network between the hosts that follows from it."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Iterator
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter
from rich import box
from rich.table import Table

import hvdkit
from hvdkit import paths
from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.commands import checks, fields
from hvdkit.commands.request import Argument, Option, say
from hvdkit.core.group import threads_per_rank
from hvdkit.defaults import FRAMEWORK
from hvdkit.errors import Faults, RequestError
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.launch.placement import Placement
from hvdkit.launch.slots import Slot
from hvdkit.report import csv_files, plotting
from hvdkit.results.bench import Bench, BenchRow, BenchSpec, Collective, Dtype, Redop, step_bytes
from hvdkit.results.machine import this_machine
from hvdkit.runtimes.store import Runtime, find
from hvdkit.simulator import cluster, piecewise_linear
from hvdkit.simulator.cluster import Cluster, CurvePiece, Device, Level, Measured, Software
from hvdkit.simulator.measured_costs import level
from hvdkit.simulator.piecewise_linear import of_pieces
from hvdkit.worker import tuning
from hvdkit.worker.bench import RANKS, ROWS

_NO_RATE = 1e11  # Mbit/s: the time does not grow with the size
_COLUMNS = {
    "size": "B", "count": "", "type": "", "redop": "", "time": "us", "algbw": "Mbit/s", "busbw": "Mbit/s", "#wrong": "",
    "p50": "us", "p95": "us", "p99": "us", "repeats": "", "of link": "",
}  # fmt: skip
LARGEST_BYTES = 2**31 - 1  # Horovod counts a tensor's elements in 31 bits
_FASTEST = 1e12  # Mbit/s: where times do not grow with the size there is no rate
_ROWS = TypeAdapter(list[BenchRow])
# What differs by rank is no setting.
_OF_A_RANK = {f"HOROVOD_{field.name.upper()}" for field in fields_of(Slot)} | {"HOROVOD_GLOO_RENDEZVOUS_PORT"}


class BenchRequest(fields.StartsRanks):
    """Time a collective by size, check each element, and write a cluster file for `predict`.

    Wrong elements are no error: see `wrong` of the rows.
    """

    collective: Annotated[
        Collective, Argument("allreduce, allgather, broadcast, alltoall or reducescatter", metavar="COLLECTIVE")
    ]
    framework: fields.Framework = FRAMEWORK
    np: fields.Ranks = 2
    min_bytes: Annotated[int, Option("the smallest size"), Field(ge=1, le=LARGEST_BYTES)] = 4
    max_bytes: Annotated[int, Option("the largest size"), Field(ge=1, le=LARGEST_BYTES)] = 64 * 2**20
    factor: Annotated[float, Option("ratio of each size to the one before"), Field(ge=1.1, le=1024)] = 4.0
    dtype: Annotated[Dtype, Option("float16, float32, float64, int32, int64, uint8 or int8")] = "float32"
    redop: Annotated[Redop, Option("sum, average, min or max")] = "sum"
    seconds: Annotated[float, Option("seconds to spend on a size, with at least 3 repeats"), Field(gt=0, le=3600)] = 2.0
    device: Annotated[
        Literal["auto", "cpu", "gpu"], Option("where the ranks compute: auto, cpu or gpu", ("--on",), old=("--device",))
    ] = "auto"
    link_mbit_per_s: Annotated[float | None, Option("the link's rate, to show the share of it"), Field(gt=0)] = None
    add_to: Annotated[Path | None, Option("a cluster file to add the result to, in a new file")] = None


def _checked(request: BenchRequest, placement: Placement) -> tuple[Runtime, Cluster | None]:
    """The runtime, and the cluster file that the result is added to. Raises RequestError with all faults."""
    framework, dtype, np = request.framework, request.dtype, request.np
    faults, known = Faults(), None
    with faults.collected():
        runtime = find(framework)
    faults += placement.faults(framework, elastic=False)
    if framework in CAPABILITIES and dtype not in CAPABILITIES[framework]:
        faults.append(f"--dtype {dtype}: {framework} does not reduce it")
    if request.collective == "reducescatter" and request.redop not in ("sum", "average"):
        faults.append(f"--redop {request.redop}: expected one of sum, average")
    if np == 1:
        faults.append("-np 1: expected 2 or more ranks; one has nobody to send to")
    if request.min_bytes > request.max_bytes:
        faults.append(f"--min-bytes {request.min_bytes}: expected at most --max-bytes {request.max_bytes}")
    with faults.collected():
        if request.device == "gpu" and placement.here:
            checks.check_gpu(framework, np)
    try:
        known = cluster.load(request.add_to) if request.add_to else None
    except RequestError as error:
        faults.append(f"--add-to: {error}")
    faults.report()
    return runtime, known


def sizes(min_bytes: int, max_bytes: int, factor: float, step: int) -> list[int]:
    """From the smallest to the largest, each `factor` times the one before, in whole multiples of `step`."""
    chosen: list[int] = []
    size = float(min_bytes)
    while size <= max_bytes or not chosen:
        rounded = max(step, round(size / step) * step)
        if rounded not in chosen:
            chosen.append(rounded)
        size *= factor
    return chosen


def run(request: BenchRequest) -> Bench:
    """Measure; each row is printed on standard error as soon as it is known. Raises what the launcher raises."""
    placement = Placement.of(request)
    runtime, known = _checked(request, placement)
    with paths.claimed(
        request.out or paths.default_out(request.collective, "bench"), request.overwrite, inputs=[request.add_to]
    ) as folder:
        say([] if request.device == "gpu" or runtime.gpu else placement.crowding)
        result = _measure(request, runtime, placement, folder)
        csv_files.save(folder / "bench.csv", result.records())
        cluster.save(network(result) if known is None else added(known, measured(result)), folder / "cluster.yaml")
        bench_plot(result, measured(result), folder / "bench.png")
        return result


def lines(request: BenchRequest, result: Bench) -> Iterator[str | Table]:
    """The columns of nccl-tests, and what the network is by them."""
    yield bench_table(result)
    yield from fit_lines(measured(result))
    yield f"written to {result.folder / 'bench.json'}, .csv and .png, and cluster.yaml"


def status(result: Bench) -> int:
    """1 where elements were wrong."""
    return int(any(row.wrong for row in result.rows))


def _measure(request: BenchRequest, runtime: Runtime, placement: Placement, folder: Path) -> Bench:
    """Measure, and write bench.json into `folder` (absolute, existing, empty)."""
    environment, step = dict(runtime.environment), step_bytes(request.collective, request.dtype, request.np)
    spec = BenchSpec(
        collective=request.collective,
        dtype=request.dtype,
        redop=request.redop,
        sizes_bytes=sizes(request.min_bytes, request.max_bytes, request.factor, step),
        seconds=request.seconds,
        device=request.device,
    )
    if placement.here:
        environment["OMP_NUM_THREADS"] = str(threads_per_rank(None, placement.np))
    if tuning.CYCLE not in os.environ:
        environment[tuning.IDLE] = os.environ.get(tuning.IDLE, str(tuning.IDLE_MS))  # as in training on CPUs
    job = Job(
        python=runtime.python,
        arguments=["-P", "-m", "hvdkit.worker.bench", request.framework, spec.model_dump_json(), str(folder)],
        np=placement.np,
        hosts=placement.hosts,
        environment=environment,
        log_dir=folder / "logs",
        stall_timeout_s=placement.stall_timeout_s,
        reports_done=True,
    )
    rows: list[BenchRow] = []

    def look() -> None:
        content = (folder / ROWS).read_bytes() if (folder / ROWS).exists() else b"[]"
        for row in _ROWS.validate_json(content)[len(rows) :]:
            if request.link_mbit_per_s:
                row = row.model_copy(update={"of_link": row.busbw_mbit_per_s / request.link_mbit_per_s})
            rows.append(row)
            say([row_line(row)])

    LAUNCHERS[placement.launcher].run(job, look)
    look()
    ranks = json.loads((folder / RANKS).read_text())
    result = Bench(
        collective=request.collective,
        framework=request.framework,
        framework_version=ranks["versions"]["framework"],
        horovod_version=ranks["versions"].get("horovod"),
        hvdkit_version=hvdkit.__version__,
        np=placement.np,
        hosts=ranks["hosts"],
        device=ranks["device"],
        algorithm="memory" if ranks["shared_memory_ranks"] and _in_memory(request, ranks) else "ring",
        shared_memory_ranks=ranks["shared_memory_ranks"],
        link_mbit_per_s=request.link_mbit_per_s,
        memory_bytes_per_s=ranks["memory_bytes_per_s"],
        settings={key: value for key, value in sorted(ranks["settings"].items()) if key not in _OF_A_RANK},
        rows=rows,
        machine=this_machine(),
    )
    for name in (ROWS, RANKS):
        (folder / name).unlink()
    return result.written(folder)


def measured(bench: Bench) -> Measured:
    """The medians by the bytes that a rank puts in, as pieces of latency and rate."""
    share = bench.np if bench.collective == "allgather" else 1
    sizes, seconds = [row.size_bytes // share for row in bench.rows], [1e-6 * row.p50_us for row in bench.rows]
    fitted = piecewise_linear.fit(sizes, seconds)
    pieces = [piece.model_copy(update={"mbit_per_s": min(piece.mbit_per_s, _FASTEST)}) for piece in fitted]
    # A single run differs from the median by the spread of the repeats: the standard deviation, if they are normal.
    spread = statistics.median(100 * (row.p95_us / row.p50_us - 1) / 1.645 for row in bench.rows)
    return Measured(
        operation=bench.collective,
        ranks=bench.np,
        ranks_per_host=max(bench.hosts.count(host) for host in bench.hosts),
        algorithm=bench.algorithm,
        pieces=pieces,
        residual_percent=min(1000.0, max(spread, piecewise_linear.residual_percent(pieces, sizes, seconds))),
        smallest_bytes=min(sizes),
        largest_bytes=max(1, *sizes),
    )


def _in_memory(request: BenchRequest, ranks: dict[str, Any]) -> bool:
    """Whether ranks that share memory within hosts exchange tensors through it."""
    return ranks["device"] == "cpu" and (request.collective != "alltoall" or len(set(ranks["hosts"])) == 1)


def added(known: Cluster, row: Measured) -> Cluster:
    """An earlier cluster file with this measurement, in place of one of the same collective and ranks."""
    key = (row.operation, row.ranks, row.ranks_per_host, row.algorithm)
    others = [m for m in known.measured if (m.operation, m.ranks, m.ranks_per_host, m.algorithm) != key]
    return with_level(known, row).model_copy(update={"measured": [*others, row]})


def with_level(known: Cluster, row: Measured) -> Cluster:
    """The cluster with the level that a measured allreduce is of, where it lacks it: the memory that ranks of one host
    share beside links between hosts, or links beside the memory."""
    if len(known.levels) > 1 or row.operation != "allreduce":
        return known
    (only,) = known.levels
    if only.kind == "link" and row.algorithm == "memory" and row.ranks == row.ranks_per_host:
        levels = [level(row).model_copy(update={"ranks": row.ranks}), only]
        fits = known.ranks_per_host == 1 and only.name != "memory"
        return known.model_copy(update={"levels": levels, "ranks_per_host": row.ranks}) if fits else known
    if only.kind == "memory" and row.algorithm == "ring" and row.ranks_per_host == 1:
        levels = [only.model_copy(update={"ranks": known.ranks_per_host}), level(row)]
        return known.model_copy(update={"levels": levels}) if only.name != "link" else known
    return known


def network(bench: Bench) -> Cluster:
    """The links between the ranks, or the memory that they share, by this collective alone."""
    row = measured(bench)
    device = Device(name=bench.machine.processor[:100] or bench.device)
    if bench.memory_bytes_per_s:
        device = device.model_copy(update={"memory_bytes_per_s": bench.memory_bytes_per_s})
    return Cluster(
        schema_version=1,
        name=f"measured-{bench.np}-ranks",
        description=f"{bench.np} ranks on {len(set(bench.hosts))} host(s), by `hvdkit bench`",
        source=f"{bench.framework} {bench.framework_version}, Horovod {bench.horovod_version}, "
        f"hvdkit {bench.hvdkit_version}; a hop is the whole time over the hops, Horovod's negotiation included",
        ranks_per_host=row.ranks_per_host,
        device=device,
        levels=_levels(row, device),
        software=Software(
            negotiation_us=0,
            negotiation_us_per_doubling=0,
            algorithms=["ring" if row.algorithm == "memory" else row.algorithm],
            synchronous=bench.device == "cpu",
        ),
        measured=[row],
        residual_percent=row.residual_percent,
    )


def _levels(row: Measured, device: Device) -> list[Level]:
    """The links or the memory that a measured collective is of."""
    if row.algorithm == "halving-doubling":  # 2 log2(p) messages, of n/2, n/4, … bytes
        hops, sent = 2 * math.ceil(math.log2(row.ranks)), 2 * (row.ranks - 1) / row.ranks
        return [Level(name="link", pieces=[piece.scaled(sent / hops, 1 / hops, sent) for piece in row.pieces])]
    if row.algorithm == "ring" or row.ranks == row.ranks_per_host:
        return [level(row)]
    # Over several hosts the links take most of the time. In memory a byte is read and written twice.
    rate = CurvePiece(from_bytes=0, latency_us=0, mbit_per_s=8e-6 * device.memory_bytes_per_s / 4)
    memory = Level(name="memory", kind="memory", ranks=row.ranks_per_host, pieces=[rate])
    return [memory, level(row.model_copy(update={"ranks": row.ranks // row.ranks_per_host, "algorithm": "ring"}))]


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
