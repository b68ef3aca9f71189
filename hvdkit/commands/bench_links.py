"""`hvdkit bench links -H …`: what the links between hosts carry, once or over time."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

import hvdkit
from hvdkit import paths
from hvdkit.commands import doctor
from hvdkit.commands.request import Form, Option, say
from hvdkit.errors import RequestError
from hvdkit.launch.hosts import Host
from hvdkit.launch.probes import ANSWER_S, Unreachable
from hvdkit.report import csv_files, plotting
from hvdkit.report.tabular import Cell, Of, Table, number, percent, terminal
from hvdkit.results.links import LinkRow, Links
from hvdkit.simulator import cluster
from hvdkit.simulator.cluster import Cluster, CurvePiece, Device, Level, Software

_MOST_NUMBERS = 16  # hosts up to which each field of a heat map has its figure
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = Form(r"[0-9]{1,9}[smhd]", "a number and s, m, h or d, such as 10m")
_MORE = 1.5  # times what is rated: another network, or another figure
_OF_90_PERCENT = 1.645  # standard deviations, of a normal distribution


class BenchLinksRequest(doctor.AsksHosts):
    """Measure latency and bandwidth between every two hosts, one pair at a time, beside the rated figure.

    Writes a table, a heat map and a cluster file for `predict`.
    """

    rated: Annotated[
        float | None, Option("Mbit/s that the links are sold as", shown="the interface's"), Field(gt=0)
    ] = None
    seconds: Annotated[float, Option("seconds to send in each direction"), Field(ge=0.2, le=600)] = 1.0
    every: Annotated[str | None, _DURATION, Option("measure again and again, such as every 10m")] = None
    lasting: Annotated[str | None, _DURATION, Option("how long, such as 24h", ("--for",), shown="until ended")] = None
    resume: Annotated[bool, Option("continue the series in --out")] = False


def run(request: BenchLinksRequest) -> Links:
    """Measure; after each round the files are whole. Raises RequestError."""
    hosts = doctor.hosts_of(request.hosts, request.hostfile)
    doctor.wanted(request.interface)
    if len(hosts) < 2:
        raise RequestError(f"-H: expected two hosts or more, as a link has two ends; got {len(hosts)}")
    if request.lasting and not request.every:
        raise RequestError("--for: expected --every with it, such as --every 10m")
    if request.resume and not (request.out and request.every):
        raise RequestError("--resume: expected --every and --out with it, the folder of the earlier series")
    names, every = [host.name for host in hosts], _seconds(request.every)
    out = request.out or paths.default_out("links", "bench")
    with paths.claimed(out, request.overwrite, request.resume) as folder:
        result = Links(hvdkit_version=hvdkit.__version__, hosts=names, seconds=request.seconds)
        if request.resume and (folder / Links.FILE).exists():
            result = Links.read(folder / Links.FILE)
            if result.hosts != names:
                raise RequestError(f"-H: expected {','.join(result.hosts)}, the hosts of the series in {out}")
        began = result.rows[0].at_s if result.rows else time.time()
        until = began + _seconds(request.lasting) if request.lasting else math.inf
        due = time.time()
        while due < until or not result.rows:
            time.sleep(max(0.0, due - time.time()))
            rows = _round(hosts, request)
            result = result.model_copy(update={"rows": [*result.rows, *rows], "rounds": result.rounds + 1})
            _write(result, folder)
            if not every:
                break
            say([_round_line(result.rounds, rows)])
            due = max(due + every, time.time())
        return result.at(folder)


def lines(request: BenchLinksRequest, result: Links) -> Iterator[Any]:
    """A line for each direction of each link, and the hours in which they carry most and least."""
    yield terminal(links_table(result), f"links between {len(result.hosts)} hosts, {result.rounds} round(s)")
    for row in result.rows[-len(result.by_link()) :]:
        if row.fault:
            yield f"fault: {row.source} to {row.target}: {row.fault}"
    if any((_share(rows) or 0) > _MORE for rows in result.by_link().values()):
        yield "note: a link carries far more than what it is rated; --interface names the network that is meant"
    if len(hours := result.by_hour()) > 1:
        quiet, peak = max(hours, key=hours.__getitem__), min(hours, key=hours.__getitem__)
        yield f"quiet: {quiet} h, {hours[quiet]:.2f} of the usual rate; peak: {peak} h, {hours[peak]:.2f} of it"
    files = "links.json, .csv and .png" + (", and cluster.yaml" if result.relative() else "")
    yield f"written to {result.folder}: {files}"


def status(result: Links) -> int:
    """1 where a link of the last round could not be measured."""
    return int(any(row.fault for row in result.rows[-len(result.by_link()) :]))


def _seconds(duration: str | None) -> float:
    return float(int(duration[:-1]) * _UNITS[duration[-1]]) if duration else 0.0


def _round(hosts: list[Host], request: BenchLinksRequest) -> list[LinkRow]:
    """Measure each pair in both directions, one after the other, so that they do not disturb each other."""
    questions = [_question(hosts, index) for index in range(len(hosts))]
    with doctor.asked(hosts, questions, request.interface) as (members, faults):
        why = {fault.host: fault.what for fault in faults}
        return [_link(source, target, why, request) for source, target in permutations(members, 2)]


def _question(hosts: list[Host], index: int) -> dict[str, Any]:
    """What each host is asked for, as by `hvdkit doctor`: its addresses, and no runtimes and files."""
    neighbour = hosts[(index + 1) % len(hosts)].name
    nothing: dict[str, Any] = {"pythons": {}, "packages": [], "package": "/dev/null", "folders": [], "mark": ""}
    return {"host": hosts[index].name, "neighbour": neighbour, **nothing}


def _link(source: doctor.Member, target: doctor.Member, why: dict[str, str], request: BenchLinksRequest) -> LinkRow:
    """One direction of a link."""
    (probe, here, _), (other, there, port) = source, target
    row = LinkRow(at_s=round(time.time(), 1), source=here.name, target=there.name)
    for host in (here, there):
        if not host.reachable or host.address is None:
            fault = why.get(host.name, "no other host reaches it; see `hvdkit doctor -H …`")
            return row.model_copy(update={"fault": f"{host.name}: {fault}"})
    try:
        patience = 3 * ANSWER_S + 3 * request.seconds
        found = probe.ask(
            "link", patience, address=there.address, port=port, token=other.token, sending_s=request.seconds
        )
    except Unreachable as error:
        found = {"fault": f"{here.name}: {error}"}
    if request.rated:
        found["rated_mbit_per_s"] = request.rated
    return LinkRow.model_validate({**row.model_dump(), **found})


def _round_line(number: int, rows: list[LinkRow]) -> str:
    rates = [row.mbit_per_s for row in rows if row.mbit_per_s]
    middle = f"{min(rates):.4g} to {max(rates):.4g} Mbit/s" if rates else "nothing measured"
    return f"{time.strftime('%F %T')} round {number}: {middle}, {sum(row.fault is not None for row in rows)} faults"


def _write(result: Links, folder: Path) -> None:
    """Write all files, each at once, and last the one that a resumed series begins with."""
    csv_files.save(folder / "links.csv", result.records())
    links_plot(result, folder / "links.png")
    if result.relative():
        cluster.save(network(result), folder / "cluster.yaml")
    result.written(folder)


def network(result: Links) -> Cluster:
    """The hosts as a cluster: the median link, and how far rates are spread over time."""
    known = [row for row in result.rows if row.mbit_per_s]
    rate = statistics.median(row.mbit_per_s or 0 for row in known)
    trip = statistics.median(row.latency_us or 0 for row in known)
    spread = math.sqrt(statistics.fmean(math.log(share) ** 2 for _, share in result.relative()))
    piece = CurvePiece(from_bytes=0, latency_us=trip / 2, mbit_per_s=rate)
    varies = min(1000.0, 100 * (math.exp(_OF_90_PERCENT * spread) - 1))
    return Cluster(
        schema_version=1,
        name=f"links-of-{len(result.hosts)}-hosts",
        description="the median of the links, one TCP connection each, by `hvdkit bench links`",
        source=f"hvdkit {result.hvdkit_version}, {result.rounds} round(s); a latency is half a round trip",
        hosts=len(result.hosts),
        device=Device(name="unknown"),
        levels=[Level(name="link", pieces=[piece], varies_percent=varies)],
        software=Software(synchronous=True),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _share(rows: list[LinkRow]) -> float | None:
    rated, rate = _median(row.rated_mbit_per_s for row in rows), _median(row.mbit_per_s for row in rows)
    return rate / rated if rate is not None and rated else None


def _rated(rows: list[LinkRow]) -> Cell:
    rated = _median(row.rated_mbit_per_s for row in rows)
    return Cell("unknown") if rated is None else number(rated)


def links_table(result: Links) -> Table:
    """A row for each direction of a link: medians over the rounds, and the least and the most that it carried."""
    columns: dict[str, Of[list[LinkRow]]] = {
        "from": lambda rows: rows[0].source,
        "to": lambda rows: rows[0].target,
        "round trip µs": lambda rows: number(_median(row.latency_us for row in rows), 0),
        "p95": lambda rows: number(_median(row.latency_p95_us for row in rows), 0),
        "Mbit/s": lambda rows: number(_median(row.mbit_per_s for row in rows), 1),
        "least": lambda rows: number(min((row.low_mbit_per_s for row in rows if row.low_mbit_per_s), default=None), 1),
        "most": lambda rows: number(max((row.high_mbit_per_s for row in rows if row.high_mbit_per_s), default=None), 1),
        "rated": lambda rows: _rated(rows),
        "of it": lambda rows: percent(_share(rows)),
    }
    return Table.of("links", result.by_link().values(), columns)


def links_plot(result: Links, path: Path) -> None:
    """Draw latency and bandwidth of each pair as heat maps; of several rounds, rates by time. Raises RunError."""
    series, hosts = result.rounds > 1, result.hosts
    rated = _median(row.rated_mbit_per_s for row in result.rows)
    with plotting.picture(path, 13, 10 if series else 5.5, "constrained") as figure:
        grid = figure.add_gridspec(2 if series else 1, 2)
        figures = (("latency_us", "round trip, µs", "viridis"), ("mbit_per_s", "bandwidth, Mbit/s", "viridis_r"))
        for column, (key, title, colours) in enumerate(figures):
            axes = figure.add_subplot(grid[0, column])
            medians = {link: _median(getattr(row, key) for row in rows) for link, rows in result.by_link().items()}
            cells = [[medians.get((source, target)) for target in hosts] for source in hosts]
            drawn = axes.imshow([[float("nan") if c is None else c for c in row] for row in cells], cmap=colours)
            figure.colorbar(drawn, ax=axes)
            axes.set(title=title, xlabel="to", ylabel="from")
            axes.set_xticks(range(len(hosts)), hosts, rotation=90 if len(hosts) > _MOST_NUMBERS / 2 else 0)
            axes.set_yticks(range(len(hosts)), hosts)
            for y, row in enumerate(cells if len(hosts) <= _MOST_NUMBERS else []):
                for x, cell in enumerate(row):
                    box = {"facecolor": "white", "alpha": 0.7, "lw": 0}
                    axes.text(x, y, "–" if cell is None else f"{cell:.4g}", ha="center", va="center", bbox=box)
        if series:
            axes = figure.add_subplot(grid[1, :])
            began = result.rows[0].at_s
            for (source, target), rows in result.by_link().items():
                rates = [float("nan") if row.mbit_per_s is None else row.mbit_per_s for row in rows]
                axes.plot([(row.at_s - began) / 3600 for row in rows], rates, ".-", label=f"{source} to {target}")
            axes.set(title="bandwidth, Mbit/s", xlabel=f"hours since {time.strftime('%F %R', time.localtime(began))}")
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
            if len(result.by_link()) <= _MOST_NUMBERS:
                axes.legend(fontsize="small", ncols=2)
        figure.suptitle(f"links between {len(hosts)} hosts, rated {f'{rated:g} Mbit/s' if rated else 'unknown'}")
