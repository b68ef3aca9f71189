"""Which host the others have lost, and how to say so."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hvdkit.launch.agent.link_monitor import DOWN_S
from hvdkit.launch.diagnosis.exits import RankEnd, RankFailure, shown_tail
from hvdkit.launch.job import Job


@dataclass(frozen=True)
class Cut:
    """A host's link is gone, as the guard of one of its ranks tells; one that is `up` has lost its carrier. `since` is
    of the launcher's monotonic clock."""

    rank: int
    host: str
    interface: str
    up: bool
    since: float


def cut_failure(job: Job, cut: Cut, ends: list[RankEnd]) -> RankFailure:
    """The error that tells the user of a host without a link."""
    state = "has no carrier" if cut.up else "is down"
    end = ends[cut.rank]
    return RankFailure(
        f"host {cut.host} is cut off: its interface {cut.interface} {state} for {DOWN_S:.0f} s (rank {cut.rank}); "
        f"all ranks were ended; {shown_tail(f'its log, {job.log(cut.rank)}', end.tail)}",
        end,
    )


def unreachable(job: Job, ends: list[RankEnd]) -> RankFailure | None:
    """The error where hosts lost each other; None where all that were asked have answered.

    To blame is the host that has lost touch with most others, whether they got no answer from it or it from them:
    which of the two shows is a matter of who was sending. Where several have alike, it is the one that most accuse;
    where those are several too, as with two hosts alone, all of them are named.
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
        told = f"hosts {', '.join(blamed)} did not answer each other: the way between them is broken"
    elif accusers[blamed[0]]:
        by = ", ".join(sorted(accusers[blamed[0]]))
        told = f"host {blamed[0]} did not answer {by}: its link or the way to it is broken, or the machine is dead"
    else:
        whom = ", ".join(sorted(accused[blamed[0]]))
        told = f"host {blamed[0]} got no answer from {whom}: its link or the way from it is broken"
    return RankFailure(f"{told}; all ranks were ended; {shown_tail(f'its log, {job.log(end.rank)}', end.tail)}", end)
