"""What is wrong with hosts that `hvdkit doctor` has examined, and what to do about each."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from hvdkit.results.doctor import HostFault, HostReport
from hvdkit.runtimes.store import PACKAGE

T = TypeVar("T")
_LEAST_FREE_BYTES = 1 << 30


def judge(reports: Sequence[HostReport], interface: str | None, folder: Path) -> list[HostFault]:
    """All that is wrong with hosts that were reached."""
    there = [report for report in reports if report.reachable]
    faults = [fault for report in there for fault in (*_network(report, interface, len(there)), *_room(report, folder))]
    return [*faults, *_unequal(there)]


def _network(host: HostReport, interface: str | None, hosts: int) -> Iterator[HostFault]:
    """Addresses that do not answer, and names that lead elsewhere."""
    has = ", ".join(f"{interface.name} {interface.address}" for interface in host.interfaces) or "none"
    if interface is not None and host.interface is None and not host.ways:
        yield HostFault(
            host=host.name,
            what=f"no interface fits --interface {interface}; it has {has}",
            remedy="name a network that all hosts share, such as 10.0.0.0/8, instead of an interface",
        )
    elif hosts > 1 and host.neighbour is None:
        tried = "; ".join(f"{way.address}: {way.fault}" for way in host.ways) or f"it has {has}"
        yield HostFault(
            host=host.name,
            what=f"no other host reaches it ({tried})",
            remedy="a firewall may close ports that programs open: open them between the hosts",
        )
    elif host.address is not None and ipaddress.ip_address(host.address).version == 6:
        yield HostFault(
            host=host.name,
            what=f"its neighbour reaches it by IPv6 alone ({host.address})",
            remedy="give the hosts IPv4 addresses in a network that they share: Horovod's rendezvous needs IPv4",
        )
    if host.name not in host.resolves:
        yield HostFault(
            host=host.name,
            what="there, the name service gives no answer about its own name in 3 s",
            remedy="name the hosts in /etc/hosts, or correct the nameserver in /etc/resolv.conf",
            fault=False,
        )
    own = host.resolves.get(host.name, [])
    if hosts > 1 and own and all(ipaddress.ip_address(address).is_loopback for address in own):
        yield HostFault(
            host=host.name,
            what=f"on itself, its name means {own[0]}, which other hosts cannot reach",
            remedy=f"in its /etc/hosts, give {host.name} its own address ({host.address}); "
            "a Horovod that hvdkit has built works all the same",
            fault=False,
        )
    for way in host.ways:
        if way.fault and way.fault.startswith("another host") and host.neighbour is not None:
            yield HostFault(
                host=host.name,
                what=f"{way.address}: {way.fault}, as bridges of containers have",
                remedy=f"nothing, as long as HOROVOD_GLOO_IFACE is not set to its interface; {host.interface} is used",
                fault=False,
            )


def _room(host: HostReport, folder: Path) -> Iterator[HostFault]:
    """Too little memory, disk, cores or GPUs."""
    for path, free in host.folders.items():
        if free is None and path != str(folder):
            yield HostFault(
                host=host.name, what=f"no folder {path}, where this command runs",
                remedy="start from a folder that all hosts have", fault=False,
            )  # fmt: skip
        elif free is not None and free < _LEAST_FREE_BYTES:
            yield HostFault(
                host=host.name, what=f"{free / 2**20:.0f} MiB free on the disk of {path}",
                remedy="free space there", fault=False,
            )  # fmt: skip
    if host.memory_bytes is not None and host.memory_bytes < _LEAST_FREE_BYTES:
        what = f"{host.memory_bytes / 2**20:.0f} MiB of memory available"
        yield HostFault(host=host.name, what=what, remedy="end what else runs there", fault=False)
    devices, kind = (len(host.gpus), "GPU") if host.gpus else (host.cores or host.slots, "core")
    if host.slots > devices:
        what = f"{host.slots} slots on {devices} {kind}{'s' if devices > 1 else ''}"
        yield HostFault(host=host.name, what=what, remedy=f"give no more slots than {kind}s", fault=False)


def _unequal(hosts: Sequence[HostReport]) -> Iterator[HostFault]:
    """What differs from most other hosts: hvdkit, runtimes, GPUs, the folder of results."""
    usual = _usual(hosts, lambda host: host.hvdkit)
    for host in hosts:
        if host.hvdkit is None or host.hvdkit != usual:
            what = f"no hvdkit in {PACKAGE}" if host.hvdkit is None else "its hvdkit differs from the other hosts'"
            yield HostFault(
                host=host.name, what=what, remedy=f"copy or share {PACKAGE.parent}, or install the same release"
            )
    for name in dict.fromkeys(name for host in hosts for name in host.runtimes):
        yield from _of_runtime(name, [host for host in hosts if name in host.runtimes])
    gpus = _usual(hosts, lambda host: tuple(host.gpus))
    for host in hosts:
        if tuple(host.gpus) != gpus:
            what = f"GPUs: {', '.join(host.gpus) or 'none'}; others have {', '.join(gpus or ()) or 'none'}"
            remedy = "train on hosts of one kind, or expect the speed of the slowest"
            yield HostFault(host=host.name, what=what, remedy=remedy, fault=False)
    if len({host.shares_files for host in hosts}) > 1:
        for host in hosts:
            if not host.shares_files:
                remedy = "training on several hosts needs a folder that all share: choose such an --out"
                what = "it does not see the results' folder, which others share"
                yield HostFault(host=host.name, what=what, remedy=remedy, fault=False)


def _of_runtime(name: str, hosts: Sequence[HostReport]) -> Iterator[HostFault]:
    again = f"run `hvdkit runtime build {name}` there, or share the folder of the runtimes"
    versions = _usual(hosts, lambda host: tuple(sorted(host.runtimes[name].versions.items())))
    horovod = _usual(hosts, lambda host: host.runtimes[name].horovod)
    for host in hosts:
        runtime = host.runtimes[name]
        if runtime.fault is not None:
            yield HostFault(host=host.name, what=f"runtime '{name}': {runtime.fault}", remedy=again)
            continue
        usual = dict(versions or ())
        differs = [
            f"{name} {runtime.versions.get(name, 'missing')}, elsewhere {usual.get(name, 'missing')}"
            for name in sorted({*usual, *runtime.versions})
            if usual.get(name) != runtime.versions.get(name)
        ]
        if differs:
            yield HostFault(host=host.name, what=f"runtime '{name}': {'; '.join(differs)}", remedy=again)
        elif runtime.horovod != horovod:
            what = "no Horovod" if runtime.horovod is None else "another build of Horovod than the other hosts have"
            yield HostFault(host=host.name, what=f"runtime '{name}': {what}", remedy=again)


def _usual(hosts: Sequence[HostReport], what: Callable[[HostReport], T | None]) -> T | None:
    """What most hosts have; of several the first's. Hosts that have nothing do not count."""
    counted = Counter(value for host in hosts if (value := what(host)) is not None)
    return counted.most_common(1)[0][0] if counted else None
