"""`hvdkit doctor -H …`: whether ranks can run on the hosts, and what to do where they cannot."""

from __future__ import annotations

import ipaddress
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

import hvdkit
from hvdkit import paths
from hvdkit.commands import fields, host_faults
from hvdkit.commands.request import Option
from hvdkit.errors import RequestError
from hvdkit.launch import launchers
from hvdkit.launch.hosts import Host, parse_hosts, read_hostfile, shown
from hvdkit.launch.launchers import slurm
from hvdkit.launch.probes import START_S, Probe, Unreachable, way
from hvdkit.report.tabular import Cell, Table, number, terminal
from hvdkit.results.doctor import HostFault, HostReport, HostsReport, Interface, Route, RuntimeThere
from hvdkit.runtimes import doctor as this_machine
from hvdkit.runtimes import machine, pins, store
from hvdkit.runtimes.doctor import Report
from hvdkit.runtimes.store import PACKAGE, Runtime

_NAME_S = 3.0
_NCCL = [f"nvidia-nccl-cu{version}" for version in (11, 12, 13)]
_PACKAGES = ["horovod", "numpy", "keras", "pydantic", "safetensors", *_NCCL]


class AsksHosts(fields.WritesFolder):
    """A command that starts a probe on hosts and no ranks."""

    hosts: Annotated[str | None, Option("host:slots,...: these", ("-H", "--hosts"), shown="the allocation's")] = None
    hostfile: Annotated[Path | None, Option("a file of hosts, as MPI's and horovodrun's")] = None
    interface: Annotated[
        str | None, Option("such as eth0 or 10.0.0.0/8", metavar="NAME|NETWORK", shown="the ranks'")
    ] = None


class DoctorRequest(AsksHosts):
    """Show what is installed and what is broken, with the command that repairs it: here, or on other hosts."""


def run(request: DoctorRequest) -> Report | HostsReport:
    """Examine the hosts that are named or allocated, or else this machine. Raises RequestError."""
    console = Console(stderr=True)
    if hosts := hosts_of(request.hosts, request.hostfile):
        wanted(request.interface)
        with (
            paths.claimed(request.out or paths.default_out("hosts", "doctor"), request.overwrite) as folder,
            console.status(f"examining {len(hosts)} hosts"),
        ):
            return examine(hosts, request.interface, folder)
    if given := next((name for name in ("interface", "out", "overwrite") if getattr(request, name)), None):
        raise RequestError(f"--{given}: expected -H or --hostfile with it")
    with console.status("examining the machine and the runtimes"):
        return this_machine.examine()


def lines(request: DoctorRequest, result: Report | HostsReport) -> Iterator[Any]:
    """The tables, each fault and note with what to do, and a verdict."""
    if isinstance(result, Report):
        yield from result.lines()
        return
    table = Table.of("hosts", result.hosts, _COLUMNS).without_empty(("GPUs", "NCCL", "latency"))
    yield terminal(table, "hosts, and how the one before each reaches it")
    for fault in result.faults:
        yield f"{'fault' if fault.fault else 'note'}: {fault.host}: {fault.what}\n  remedy: {fault.remedy}"
    bad = len({fault.host for fault in result.faults if fault.fault})
    verdict = f"{bad} with faults" if bad else "ranks can run on them"
    reached = sum(host.reachable for host in result.hosts)
    yield f"{reached} of {len(result.hosts)} hosts answer, {verdict} ({result.seconds:.1f} s)"
    yield f"written to {result.folder / result.FILE}"


def _versions(host: HostReport) -> str:
    """The version of Horovod in each of its runtimes."""
    there = host.runtimes.items()
    lines = (f"{name}: {it.fault}" if it.fault else f"{name} {it.versions.get('horovod', '–')}" for name, it in there)
    return "\n".join(lines) or "–"


def _nccl(host: HostReport) -> str:
    packages = {name: version for runtime in host.runtimes.values() for name, version in runtime.versions.items()}
    return ", ".join(sorted({version for name, version in packages.items() if name.startswith("nvidia-nccl")})) or "–"


def _gib(count: int | None) -> Cell:
    return number(None if count is None else count / 2**30, 1)


_COLUMNS: dict[str, Callable[[HostReport], Cell | str]] = {
    "host": lambda host: host.name,
    "by": lambda host: host.way,
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
    "in memory": lambda host: "–" if host.shared_memory is None else "yes" if host.shared_memory == "works" else "no",
}


def status(result: Report | HostsReport) -> int:
    """1 if something that is needed is broken, or ranks cannot run on the hosts; else 0."""
    return result.exit_status


def hosts_of(option: str | None, hostfile: Path | None) -> list[Host]:
    """The hosts of -H, of --hostfile, or of the Slurm allocation; empty where there is none of them.

    Raises RequestError for what cannot be read, and for both options at once.
    """
    if option is not None and hostfile is not None:
        raise RequestError("--hostfile: expected either it or -H")
    allocated = launchers.choose() == "slurm"
    if hostfile is not None:
        option = shown(read_hostfile(hostfile))
    if option is None:
        return slurm.allocation() if allocated else []
    return parse_hosts(option, 1)


def examine(hosts: Sequence[Host], interface: str | None, folder: Path) -> HostsReport:
    """Examine the hosts, all at once, and write doctor.json into `folder`.

    `interface` is the name of an interface or a network such as 10.0.0.0/8; without it, the one by which its neighbour
    reaches a host is shown. Raises RequestError for an interface that can be neither.
    """
    began = time.monotonic()
    runtimes = store.installed()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor.json.") as mark:
        questions = [_question(hosts, index, runtimes, folder, Path(mark.name)) for index in range(len(hosts))]
        with asked(hosts, questions, interface) as (members, faults):
            reports = [report for _, report, _ in members]
    faults += host_faults.judge(reports, interface, folder)
    order = {report.name: index for index, report in enumerate(reports)}
    faults.sort(key=lambda fault: (not fault.fault, order[fault.host]))
    result = HostsReport(
        hvdkit_version=hvdkit.__version__, runtimes=[runtime.name for runtime in runtimes], hosts=reports,
        faults=faults, seconds=round(time.monotonic() - began, 2),
    )  # fmt: skip
    return result.written(folder)


@contextmanager
def asked(
    hosts: Sequence[Host], questions: list[dict[str, Any]], interface: str | None
) -> Iterator[tuple[list[Member], list[HostFault]]]:
    """The hosts, all of which are asked at once, and how the others reach each; and what went wrong there."""
    fits, faults = wanted(interface), list[HostFault]()
    pythons = [str(runtime.python) for runtime in store.installed()]
    allocated = {host.name for host in slurm.allocation()} if launchers.choose() == "slurm" else set()
    with ExitStack() as stack, ThreadPoolExecutor(2 * len(hosts)) as pool:
        ways = ways_to(hosts, allocated, pool)
        reports = [HostReport(name=host.name, slots=host.slots, way=way) for host, way in zip(hosts, ways, strict=True)]
        probes = [stack.enter_context(Probe(host, way, pythons)) for host, way in zip(hosts, ways, strict=True)]
        ports = pool.map(facts, probes, reports, questions, [faults] * len(hosts))
        members = list(zip(probes, reports, ports, strict=True))
        reach([member for member in members if member[1].reachable], fits, interface is not None, pool)
        yield members, faults


def ways_to(hosts: Sequence[Host], allocated: set[str], pool: ThreadPoolExecutor) -> list[str]:
    """How commands get to the hosts. Whether one is this machine, the name service says; it has not long."""
    futures = [pool.submit(way, host, host.name in allocated) for host in hosts]
    wait(futures, _NAME_S)
    return [future.result() if future.done() else "ssh" for future in futures]


def wanted(interface: str | None) -> Callable[[Interface], bool]:
    """Whether an interface is asked for: by its name, by its network or, without `interface`, any but the loopback's.

    Raises RequestError for what can be neither.
    """
    if interface is None:
        return lambda it: it.name != "lo"
    if "/" not in interface:
        return lambda it: it.name == interface
    try:
        network = ipaddress.ip_network(interface, strict=False)
    except ValueError:
        raise RequestError(
            f"--interface {interface}: expected a name such as eth0, or a network such as 10.0.0.0/8"
        ) from None
    return lambda it: ipaddress.ip_address(it.address) in network


def _question(
    hosts: Sequence[Host], index: int, runtimes: Sequence[Runtime], folder: Path, mark: Path
) -> dict[str, Any]:
    """What a host is asked for."""
    names = [distribution for runtime in runtimes for distribution in pins.ALL[runtime.name].distributions]
    return {
        "host": hosts[index].name,
        "neighbour": hosts[(index + 1) % len(hosts)].name,
        "pythons": {runtime.name: str(runtime.python) for runtime in runtimes},
        "packages": [*names, *_PACKAGES],
        "package": str(PACKAGE),
        "folders": list(dict.fromkeys((str(folder), str(Path.cwd()), "/tmp"))),
        "mark": str(mark),
        "sharing": machine.SHARED_MEMORY_PROBE.read_text(),
    }


def facts(probe: Probe, report: HostReport, question: dict[str, Any], faults: list[HostFault]) -> int:
    """Start a probe and fill in what the host has; returns the probe's port, or 0."""
    try:
        probe.start()
        token = probe.token if question["neighbour"] != question["host"] else ""  # nobody has to reach a single host
        facts = probe.ask("facts", START_S, token=token, **question)
    except Unreachable as error:
        faults.append(HostFault(host=report.name, what=str(error), remedy=error.remedy))
        return 0
    report.reachable, port = True, int(facts.pop("port"))
    facts["runtimes"] = {name: RuntimeThere.model_validate(runtime) for name, runtime in facts["runtimes"].items()}
    facts["interfaces"] = [Interface.model_validate(interface) for interface in facts["interfaces"]]
    for key, value in facts.items():
        setattr(report, key, value)
    return port


Member = tuple[Probe, HostReport, int]  # a host of the ring, and the port of its probe


def reach(ring: list[Member], fits: Callable[[Interface], bool], chosen: bool, pool: ThreadPoolExecutor) -> None:
    """Fill in by which interface and address others reach each host: each connects to the next one, as in Horovod's
    ring.

    Only interfaces that fit are tried. Unless they were `chosen`, of several that answer it is the one that ranks use:
    that of HOROVOD_GLOO_IFACE, or that which the host's name means, or by which it reaches the next host.
    """
    of_ranks = os.environ.get("HOROVOD_GLOO_IFACE")
    means = wanted(of_ranks) if of_ranks else lambda _: False
    for step in (-1, 1) if len(ring) > 1 else ():  # from the host before it and, without an answer, from that after it
        lost = [index for index, (_, report, _) in enumerate(ring) if all(way.fault for way in report.ways)]
        others = [ring[(index + step) % len(ring)][0] for index in lost]
        list(pool.map(_try, (ring[index] for index in lost), others, [fits] * len(lost)))
    for position, (_, report, _) in enumerate(ring):
        before, after = ring[position - 1][1], ring[(position + 1) % len(ring)][1]
        named = [card.address for card in report.interfaces if means(card)]
        preferred = [*named, *before.resolves.get(report.name, []), *(way.source for way in after.ways if way.source)]
        answered = {way.address for way in report.ways if way.fault is None}
        usable = {
            card.address: card.name
            for card in report.interfaces
            if fits(card) and (card.address in answered or len(ring) == 1)
        }
        best = next((address for address in (*([] if chosen else preferred), *usable) if address in usable), None)
        if best is not None:
            report.interface, report.address = usable[best], best


def _try(member: Member, other: Probe, fits: Callable[[Interface], bool]) -> None:
    """Let another host connect to each address that fits."""
    probe, report, port = member
    addresses = [card.address for card in report.interfaces if fits(card)]
    wanted = [{"address": address, "port": port, "token": probe.token} for address in addresses]
    try:
        answers = other.ask("reach", 15.0 + 4.0 * len(addresses), ways=wanted)["ways"]
        report.ways = [Route.model_validate(answer) for answer in answers]
    except Unreachable as error:
        report.ways = [Route(address=address, fault=f"{other.host.name}: {error}") for address in addresses]
