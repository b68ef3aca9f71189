"""Whether hosts reach each other, and how soon: each connects to the next one, in a ring as Horovod's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from hvdkit.launch.probes import Probe, Unreachable
from hvdkit.results.doctor import HostReport, Interface, Route


@dataclass
class Member:
    """A host of the ring, and the port of its probe."""

    probe: Probe
    report: HostReport
    port: int


def reach(ring: list[Member], fits: Callable[[Interface], bool], chosen: bool, pool: ThreadPoolExecutor) -> None:
    """Fill in by which interface and address others reach each host.

    Only interfaces that fit are tried. Unless they were `chosen`, of several that answer it is the one that the host's
    name means, or by which it reaches the next host, as its ranks do.
    """
    if len(ring) < 2:
        for member in ring:
            _choose(member.report, [card for card in member.report.interfaces if fits(card)], [])
        return
    for step in (-1, 1):  # from the host before it and, where there is no answer, from the one after it
        lost = [index for index in range(len(ring)) if all(way.fault for way in ring[index].report.ways)]
        others = [ring[(index + step) % len(ring)].probe for index in lost]
        list(pool.map(_try, (ring[index] for index in lost), others, [fits] * len(lost)))
    for position, member in enumerate(ring):
        before, after = ring[position - 1].report, ring[(position + 1) % len(ring)].report
        preferred = [*before.resolves.get(member.report.name, []), *(way.source for way in after.ways if way.source)]
        answered = {way.address for way in member.report.ways if way.fault is None}
        usable = [card for card in member.report.interfaces if fits(card) and card.address in answered]
        _choose(member.report, usable, [] if chosen else preferred)


def _try(member: Member, other: Probe, fits: Callable[[Interface], bool]) -> None:
    """Let another host connect to each address that fits."""
    addresses = [card.address for card in member.report.interfaces if fits(card)]
    wanted = [{"address": address, "port": member.port, "token": member.probe.token} for address in addresses]
    try:
        answers = other.ask("reach", 15.0 + 4.0 * len(addresses), ways=wanted)["ways"]
        member.report.ways = [Route.model_validate(answer) for answer in answers]
    except Unreachable as error:
        member.report.ways = [Route(address=address, fault=f"{other.host.name}: {error}") for address in addresses]


def _choose(report: HostReport, usable: list[Interface], preferred: list[str]) -> None:
    """The interface of the first address that is preferred and usable, else of any that is usable."""
    addresses = {card.address: card.name for card in usable}
    best = next((address for address in (*preferred, *addresses) if address in addresses), None)
    if best is not None:
        report.interface, report.address = addresses[best], best
