"""The table of `hvdkit doctor -H …`, and its faults with their remedies."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.report.tabular import Cell, Table, number
from hvdkit.results.doctor import HostReport, HostsReport

_OPTIONAL = ("GPUs", "NCCL", "latency")


def table(report: HostsReport) -> Table:
    """A row for each host."""
    return Table.of(
        "hosts", report.hosts, {"host": lambda host: host.name, "by": lambda host: host.way, **_COLUMNS}
    ).without_empty(_OPTIONAL)


def lines(report: HostsReport) -> Iterator[str]:
    """Each fault and note with what to do, and a verdict."""
    for fault in report.faults:
        yield f"{'fault' if fault.fault else 'note'}: {fault.host}: {fault.what}\n  mend: {fault.remedy}"
    reached = sum(host.reachable for host in report.hosts)
    bad = len({fault.host for fault in report.faults if fault.fault})
    verdict = f"{bad} with faults" if bad else "ranks can run on them"
    yield f"{reached} of {len(report.hosts)} hosts answer, {verdict} ({report.seconds:.1f} s)"


def _versions(host: HostReport) -> str:
    """The version of Horovod in each of its runtimes."""
    found = host.runtimes.items()
    lines = (f"{name}: {it.fault}" if it.fault else f"{name} {it.versions.get('horovod', '–')}" for name, it in found)
    return "\n".join(lines) or "–"


def _nccl(host: HostReport) -> str:
    versions = {
        version
        for runtime in host.runtimes.values()
        for package, version in runtime.versions.items()
        if package.startswith("nvidia-nccl")
    }
    return ", ".join(sorted(versions)) or "–"


def _gib(count: int | None) -> Cell:
    return number(None if count is None else count / 2**30, 1)


_COLUMNS = {
    "reachable": lambda host: "yes" if host.reachable else Cell("no", bad=True),
    "Horovod of": _versions,
    "interface": lambda host: host.interface or "–",
    "address": lambda host: host.address or "–",
    "latency": lambda host: number(host.neighbour.latency_us if host.neighbour else None),
    "slots": lambda host: number(host.slots),
    "cores": lambda host: number(host.cores),
    "GPUs": lambda host: "\n".join(host.gpus) or "–",
    "NCCL": _nccl,
    "memory": lambda host: _gib(host.memory_bytes),
    "disk": lambda host: _gib(min((free for free in host.folders.values() if free is not None), default=None)),
    "shared": lambda host: "–" if host.shares_files is None else "yes" if host.shares_files else "no",
}
