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
    return [*faults, *_unequal(there), *_sharing(there)]


def _fault(host: HostReport, what: str, remedy: str) -> HostFault:
    return HostFault(host=host.name, what=what, remedy=remedy)


def _note(host: HostReport, what: str, remedy: str) -> HostFault:
    return HostFault(host=host.name, what=what, remedy=remedy, fault=False)


def _network(host: HostReport, interface: str | None, hosts: int) -> Iterator[HostFault]:
    """Addresses that do not answer, and names that lead elsewhere."""
    has = ", ".join(f"{interface.name} {interface.address}" for interface in host.interfaces) or "none"
    if interface is not None and host.interface is None and not host.ways:
        remedy = "name a network that all hosts share, such as 10.0.0.0/8, instead of an interface"
        yield _fault(host, f"no interface fits --interface {interface}; it has {has}", remedy)
    elif hosts > 1 and host.neighbour is None:
        tried = "; ".join(f"{way.address}: {way.fault}" for way in host.ways) or f"it has {has}"
        remedy = "a firewall may close ports that programs open: open them between the hosts"
        yield _fault(host, f"no other host reaches it ({tried})", remedy)
    elif host.address is not None and ipaddress.ip_address(host.address).version == 6:
        remedy = "give the hosts IPv4 addresses in a network that they share: Horovod's rendezvous needs IPv4"
        yield _fault(host, f"its neighbour reaches it by IPv6 alone ({host.address})", remedy)
    if host.name not in host.resolves:
        remedy = "name the hosts in /etc/hosts, or correct the nameserver in /etc/resolv.conf"
        yield _note(host, "there, the name service gives no answer about its own name in 3 s", remedy)
    own = host.resolves.get(host.name, [])
    if hosts > 1 and own and all(ipaddress.ip_address(address).is_loopback for address in own):
        remedy = f"in its /etc/hosts, give {host.name} its own address ({host.address}); "
        remedy += "a Horovod that hvdkit has built works all the same"
        yield _note(host, f"on itself, its name means {own[0]}, which other hosts cannot reach", remedy)
    for way in host.ways:
        if way.fault and way.fault.startswith("another host") and host.neighbour is not None:
            remedy = f"nothing, as long as HOROVOD_GLOO_IFACE is not set to its interface; {host.interface} is used"
            yield _note(host, f"{way.address}: {way.fault}, as bridges of containers have", remedy)


def _room(host: HostReport, folder: Path) -> Iterator[HostFault]:
    """Too little memory, disk, cores or GPUs."""
    for path, free in host.folders.items():
        if free is None and path != str(folder):
            remedy = "start from a folder that all hosts have"
            yield _note(host, f"no folder {path}, where this command runs", remedy)
        elif free is not None and free < _LEAST_FREE_BYTES:
            yield _note(host, f"{free / 2**20:.0f} MiB free on the disk of {path}", "free space there")
    if host.memory_bytes is not None and host.memory_bytes < _LEAST_FREE_BYTES:
        yield _note(host, f"{host.memory_bytes / 2**20:.0f} MiB of memory available", "end what else runs there")
    devices, kind = (len(host.gpus), "GPU") if host.gpus else (host.cores or host.slots, "core")
    if host.slots > devices:
        what = f"{host.slots} slots on {devices} {kind}{'s' if devices > 1 else ''}"
        yield _note(host, what, f"give no more slots than {kind}s")


def _unequal(hosts: Sequence[HostReport]) -> Iterator[HostFault]:
    """What differs from most other hosts: hvdkit, runtimes, GPUs, the folder of results."""
    usual = _usual(hosts, lambda host: host.hvdkit)
    for host in hosts:
        if host.hvdkit is None or host.hvdkit != usual:
            what = f"no hvdkit in {PACKAGE}" if host.hvdkit is None else "its hvdkit differs from the other hosts'"
            yield _fault(host, what, f"copy or share {PACKAGE.parent}, or install the same release")
    for name in dict.fromkeys(name for host in hosts for name in host.runtimes):
        yield from _of_runtime(name, [host for host in hosts if name in host.runtimes])
    gpus = _usual(hosts, lambda host: tuple(host.gpus))
    for host in hosts:
        if tuple(host.gpus) != gpus:
            what = f"GPUs: {', '.join(host.gpus) or 'none'}; others have {', '.join(gpus or ()) or 'none'}"
            yield _note(host, what, "train on hosts of one kind, or expect the speed of the slowest")
        if not host.shares_files and any(other.shares_files for other in hosts):
            remedy = "training on several hosts needs a folder that all share: choose such an --out"
            yield _note(host, "it does not see the results' folder, which others share", remedy)


def _sharing(hosts: Sequence[HostReport]) -> Iterator[HostFault]:
    """Why ranks on CPUs talk through sockets within hosts too: Horovod's share memory on all hosts, or on none."""
    slots = _usual(hosts, lambda host: host.slots)
    if all(host.slots == 1 for host in hosts) or any(host.gpus for host in hosts):
        return
    for host in hosts:
        if host.shared_memory not in ("works", None):
            remedy = "let its container (seccomp profile) and its limits allow it; results are the same, only later"
            yield _note(host, f"no shared memory, so all ranks talk through sockets: {host.shared_memory}", remedy)
        if host.slots != slots:
            what = f"slots: {host.slots}, others have {slots}: ranks of a host talk through sockets, not shared memory"
            yield _note(host, what, "give each host equally many slots")


def _of_runtime(name: str, hosts: Sequence[HostReport]) -> Iterator[HostFault]:
    remedy = f"run `hvdkit runtime build {name}` there, or share the folder of the runtimes"
    usual = dict(_usual(hosts, lambda host: tuple(sorted(host.runtimes[name].versions.items()))) or ())
    horovod = _usual(hosts, lambda host: host.runtimes[name].horovod)
    for host in hosts:
        runtime = host.runtimes[name]
        differs = [
            f"{package} {runtime.versions.get(package, 'missing')}, elsewhere {usual.get(package, 'missing')}"
            for package in sorted({*usual, *runtime.versions})
            if usual.get(package) != runtime.versions.get(package)
        ]
        what = runtime.fault or "; ".join(differs)
        if not what and runtime.horovod != horovod:
            what = "no Horovod" if runtime.horovod is None else "another build of Horovod than the other hosts have"
        if what:
            yield _fault(host, f"runtime '{name}': {what}", remedy)


def _usual(hosts: Sequence[HostReport], what: Callable[[HostReport], T | None]) -> T | None:
    """What most hosts have; of several the first's. Hosts that have nothing do not count."""
    counted = Counter(value for host in hosts if (value := what(host)) is not None)
    return counted.most_common(1)[0][0] if counted else None
