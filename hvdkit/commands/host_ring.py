"""Whether hosts reach each other, how soon and how fast: each connects to the next one, in a ring as Horovod's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hvdkit.launch.probes import Probe, Unreachable
from hvdkit.results.doctor import HostReport, Interface, Way

_FLOOD_S = 0.3


@dataclass
class Member:
    """A host of the ring, the port of its probe, and the probe of the host that reaches it (at first, nobody's)."""

    probe: Probe
    report: HostReport
    port: int
    seen_from: Probe | None = None


def reach(ring: list[Member], fits: Callable[[Interface], bool], chosen: bool, pool: ThreadPoolExecutor) -> None:
    """Fill in by which interface and address others reach each host, and how fast that is.

    Only interfaces that fit are tried. Unless they were `chosen`, of several that answer it is the one that the host's
    name means, or by which it reaches the next host, as its ranks do.
    """
    if len(ring) < 2:
        for member in ring:
            _choose(member.report, [each for each in member.report.interfaces if fits(each)], [])
        return
    for step in (-1, 1):  # from the host before it and, where there is no answer, from the one behind it
        lost = [place for place in range(len(ring)) if all(way.fault for way in ring[place].report.ways)]
        others = [ring[(place + step) % len(ring)].probe for place in lost]
        list(pool.map(_try, (ring[place] for place in lost), others, [fits] * len(lost)))
    for place, member in enumerate(ring):
        before, behind = ring[place - 1].report, ring[(place + 1) % len(ring)].report
        preferred = [*before.resolves.get(member.report.name, []), *(way.source for way in behind.ways if way.source)]
        answered = {way.address for way in member.report.ways if way.fault is None}
        usable = [each for each in member.report.interfaces if fits(each) and each.address in answered]
        _choose(member.report, usable, [] if chosen else preferred)
    list(pool.map(_flood, [member for member in ring if member.report.address]))


def _try(member: Member, other: Probe, fits: Callable[[Interface], bool]) -> None:
    """Let another host connect to each address that fits."""
    addresses = [each.address for each in member.report.interfaces if fits(each)]
    member.report.ways, member.seen_from = _ways(other, member, addresses, 0.0), other


def _flood(member: Member) -> None:
    """Let the other host send over the chosen way."""
    assert member.seen_from is not None and member.report.address is not None
    measured = {each.address: each for each in _ways(member.seen_from, member, [member.report.address], _FLOOD_S)}
    member.report.ways = [measured.get(each.address, each) for each in member.report.ways]


def _choose(report: HostReport, usable: list[Interface], preferred: list[str]) -> None:
    """The interface of the first address that is preferred and usable, else of any that is usable."""
    addresses = {each.address: each.name for each in usable}
    best = next((each for each in (*preferred, *addresses) if each in addresses), None)
    if best is not None:
        report.interface, report.address = addresses[best], best


def _ways(other: Probe, member: Member, addresses: list[str], seconds: float) -> list[Way]:
    """How another host reaches these addresses of a host."""
    asked = [
        {"address": each, "port": member.port, "token": member.probe.token, "seconds": seconds} for each in addresses
    ]
    try:
        answers = other.ask("reach", 15.0 + 4.0 * len(addresses), ways=asked)["ways"]
    except Unreachable as error:
        return [Way(address=each, fault=f"{other.host.name}: {error}") for each in addresses]
    return [Way.model_validate(each) for each in answers]
