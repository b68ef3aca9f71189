"""`hvdkit bench`: how long a collective takes by size, and the network between the hosts that follows from it."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from pydantic import TypeAdapter

import hvdkit
from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.commands import checks
from hvdkit.core.group import threads_per_rank
from hvdkit.errors import Faults, RequestError
from hvdkit.files import write_atomic
from hvdkit.launch.job import Job
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.launch.placement import Placement
from hvdkit.launch.slots import Slot
from hvdkit.report import csv_files
from hvdkit.results.bench import COLLECTIVES, DTYPES, Bench, BenchRequest, BenchRow, step_bytes
from hvdkit.results.machine import this_machine
from hvdkit.runtimes.store import Runtime, find
from hvdkit.simulator import cluster, piecewise_linear
from hvdkit.simulator.cluster import Cluster, Device, Level, Measured, Piece, Software
from hvdkit.simulator.costs import hop_pieces
from hvdkit.worker import tuning
from hvdkit.worker.bench import RANKS, ROWS

LARGEST_BYTES = 2**31 - 1  # Horovod counts a tensor's elements in 31 bits
_FASTEST = 1e12  # Mbit/s: where times do not grow with the size there is no rate
_ROWS = TypeAdapter(list[BenchRow])
# What differs by rank is no setting.
_OF_A_RANK = {f"HOROVOD_{field.name.upper()}" for field in fields(Slot)} | {"HOROVOD_GLOO_RENDEZVOUS_PORT"}


@dataclass(frozen=True)
class Plan:
    """A bench that has passed every check that can be made before it starts."""

    request: BenchRequest
    framework: str
    runtime: Runtime
    placement: Placement
    link_mbit_per_s: float | None
    known: Cluster | None  # an earlier cluster file, which this is added to

    def cluster_with(self, bench: Bench) -> Cluster:
        """The cluster file that a finished bench makes."""
        if self.known is None:
            return network(bench)
        row = measured(bench)
        key = (row.operation, row.ranks, row.ranks_per_host, row.algorithm)
        others = [m for m in self.known.measured if (m.operation, m.ranks, m.ranks_per_host, m.algorithm) != key]
        return self.known.model_copy(update={"measured": [*others, row]})


def plan(
    collective: str,
    framework: str,
    placement: Placement,
    min_bytes: int,
    max_bytes: int,
    factor: float,
    dtype: str,
    redop: str,
    seconds: float,
    device: str,
    link_mbit_per_s: float | None,
    add_to: Path | None,
) -> Plan:
    """Check a request. Raises RequestError with all its faults."""
    np, faults, known = placement.np, Faults(), None
    with faults.collected():
        runtime = find(framework)
    faults += placement.faults(framework, elastic=False)
    if collective not in COLLECTIVES:
        faults.append(f"{collective}: expected one of {', '.join(COLLECTIVES)}")
    if dtype not in DTYPES:
        faults.append(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    elif framework in CAPABILITIES and dtype not in CAPABILITIES[framework]:
        faults.append(f"--dtype {dtype}: {framework} does not reduce it")
    redops = ("sum", "average") if collective == "reducescatter" else ("sum", "average", "min", "max")
    if redop not in redops:
        faults.append(f"--redop {redop}: expected one of {', '.join(redops)}")
    if np == 1:
        faults.append("-np 1: expected 2 or more ranks; one has nobody to send to")
    if not 1 <= min_bytes <= max_bytes <= LARGEST_BYTES:
        faults.append(
            f"--min-bytes {min_bytes}, --max-bytes {max_bytes}: expected 1 to {LARGEST_BYTES}, the smaller one first"
        )
    if not 1.1 <= factor <= 1024:
        faults.append(f"--factor {factor:g}: expected 1.1 to 1024")
    if not 0 < seconds <= 3600:
        faults.append(f"--seconds {seconds:g}: expected more than 0, up to 3600")
    if device not in ("auto", "cpu", "gpu"):
        faults.append(f"--device {device}: expected auto, cpu or gpu")
    with faults.collected():
        if device == "gpu" and placement.here:
            checks.check_gpu(framework, np)
    if link_mbit_per_s is not None and not 0 < link_mbit_per_s < float("inf"):
        faults.append(f"--link-mbit-per-s {link_mbit_per_s:g}: expected the link's rate, more than 0")
    try:
        known = cluster.load(add_to) if add_to else None
    except RequestError as error:
        faults.append(f"--add-to: {error}")
    faults.report()
    step = step_bytes(collective, dtype, np)  # type: ignore[arg-type]  # checked above
    chosen = {"collective": collective, "dtype": dtype, "redop": redop, "seconds": seconds, "device": device}
    request = BenchRequest.model_validate(chosen | {"sizes_bytes": sizes(min_bytes, max_bytes, factor, step)})
    return Plan(request, framework, runtime, placement, link_mbit_per_s, known)


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


def run(plan: Plan, folder: Path, watch: Callable[[BenchRow], None] | None = None) -> Bench:
    """Measure, into `folder` (absolute, existing, empty); `watch` is called with each row as soon as it is known.

    Writes bench.json and cluster.yaml. Raises what the launcher raises.
    """
    placement, environment = plan.placement, dict(plan.runtime.environment)
    if placement.here:
        environment["OMP_NUM_THREADS"] = str(threads_per_rank(None, placement.np))
    if tuning.CYCLE not in os.environ:
        environment[tuning.IDLE] = os.environ.get(tuning.IDLE, str(tuning.IDLE_MS))  # as in training on CPUs
    job = Job(
        python=plan.runtime.python,
        arguments=["-P", "-m", "hvdkit.worker.bench", plan.framework, plan.request.model_dump_json(), str(folder)],
        np=placement.np,
        hosts=placement.hosts,
        environment=environment,
        log_dir=folder / "logs",
        home=folder,
        stall_timeout_s=placement.stall_timeout_s,
        reports_done=True,
    )
    rows: list[BenchRow] = []

    def look() -> None:
        content = (folder / ROWS).read_bytes() if (folder / ROWS).exists() else b"[]"
        for row in _ROWS.validate_json(content)[len(rows) :]:
            if plan.link_mbit_per_s:
                row = row.model_copy(update={"of_link": row.busbw_mbit_per_s / plan.link_mbit_per_s})
            rows.append(row)
            if watch:
                watch(row)

    LAUNCHERS[placement.launcher].run(job, look)
    look()
    ranks = json.loads((folder / RANKS).read_text())
    result = Bench(
        collective=plan.request.collective,
        framework=plan.framework,
        framework_version=ranks["versions"]["framework"],
        horovod_version=ranks["versions"].get("horovod"),
        hvdkit_version=hvdkit.__version__,
        np=placement.np,
        hosts=ranks["hosts"],
        device=ranks["device"],
        algorithm="ring",
        link_mbit_per_s=plan.link_mbit_per_s,
        memory_bytes_per_s=ranks["memory_bytes_per_s"],
        settings={key: value for key, value in sorted(ranks["settings"].items()) if key not in _OF_A_RANK},
        rows=rows,
        machine=this_machine(),
    )
    for name in (ROWS, RANKS):
        (folder / name).unlink()
    write_atomic(folder / "bench.json", result.model_dump_json(indent=2) + "\n")
    csv_files.save(folder / "bench.csv", csv_files.bench(result))
    cluster.save(plan.cluster_with(result), folder / "cluster.yaml")
    return result


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


def network(bench: Bench) -> Cluster:
    """The links between the ranks, by this collective alone."""
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
        levels=[Level(name="link", pieces=_hops(row))],
        software=Software(
            negotiation_us=0,
            negotiation_us_per_doubling=0,
            algorithms=[row.algorithm],
            synchronous=bench.device == "cpu",
        ),
        measured=[row],
        residual_percent=row.residual_percent,
    )


def _hops(row: Measured) -> list[Piece]:
    """The time of one message, from that of the whole collective."""
    if row.algorithm == "ring":
        return hop_pieces(row)
    # 2 log2(p) messages, of n/2, n/4, … bytes.
    hops, sent = 2 * math.ceil(math.log2(row.ranks)), 2 * (row.ranks - 1) / row.ranks
    return [
        Piece(
            from_bytes=round(piece.from_bytes * sent / hops),
            latency_us=piece.latency_us / hops,
            mbit_per_s=piece.mbit_per_s * sent,
        )
        for piece in row.pieces
    ]
