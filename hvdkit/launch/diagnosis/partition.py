"""Which host is cut off from the others, and the error that names it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hvdkit.launch.agent.link_monitor import DOWN_S
from hvdkit.launch.diagnosis.exits import RankEnd, RankFailure, rank_failure
from hvdkit.launch.job import Job


@dataclass(frozen=True)
class LinkDown:
    """A host's interface is down, as the agent of one of its ranks reports; one that is `up` has no carrier. `since` is
    of the launcher's monotonic clock."""

    rank: int
    host: str
    interface: str
    up: bool
    since: float


def link_failure(job: Job, down: LinkDown, ends: list[RankEnd]) -> RankFailure:
    """The error that names a host without a link."""
    state = "has no carrier" if down.up else "is down"
    what = f"host {down.host} is cut off: its interface {down.interface} {state} for {DOWN_S:.0f} s (rank {down.rank})"
    return rank_failure(job, what, ends[down.rank])


def unreachable(job: Job, ends: list[RankEnd]) -> RankFailure | None:
    """The error where hosts do not reach each other; None where all have answered.

    It names the host that has lost its connection to most others, whether they got no answer from it or it from them:
    which of the two is seen depends on who was sending. Of several such hosts it names the one that most others got no
    answer from; of several of those, as with two hosts alone, all.
    """
    hosts = {end.address: end.host for end in ends if end.address}
    accusers: dict[str, set[str]] = defaultdict(set)
    accused: dict[str, set[str]] = defaultdict(set)
    for end in ends:
        for address in end.unanswered:
            whom = hosts.get(address, address)
            accusers[whom].add(end.host)
            accused[end.host].add(whom)
    if not accusers:
        return None
    weight = {host: (len(accusers[host] | accused[host]), len(accusers[host])) for host in {*accusers, *accused}}
    blamed = sorted(host for host in weight if weight[host] == max(weight.values()))
    end = next((end for end in ends if end.host == blamed[0]), ends[0])
    if len(blamed) > 1:
        message = f"hosts {', '.join(blamed)} did not answer each other: the way between them is broken"
    elif accusers[blamed[0]]:
        by = ", ".join(sorted(accusers[blamed[0]]))
        message = f"host {blamed[0]} did not answer {by}: its link or the way to it is broken, or the machine is dead"
    else:
        whom = ", ".join(sorted(accused[blamed[0]]))
        message = f"host {blamed[0]} got no answer from {whom}: its link or the way from it is broken"
    return rank_failure(job, message, end)
