"""Which host the others have lost, and how to say so."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from hvdkit.launch.ends import RankEnd, RankFailure, shown_tail
from hvdkit.launch.job import Job
from hvdkit.launch.link import DOWN_S


@dataclass(frozen=True)
class Cut:
    """A host's link is gone, as the guard of one of its ranks tells; one that is `up` has lost its carrier."""

    rank: int
    host: str
    interface: str
    up: bool


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
    """The error where a host did not answer others; None where all that were asked have answered.

    It is the host that most others accuse. Where two accuse each other alike, as with two hosts alone, both are named.
    """
    hosts = {end.address: end.host for end in ends if end.address}
    accusers: dict[str, set[str]] = defaultdict(set)
    for end in ends:
        for address in end.unanswered:
            accusers[hosts.get(address, address)].add(end.host)
    if not accusers:
        return None
    most = max(len(those) for those in accusers.values())
    lost = sorted(host for host, those in accusers.items() if len(those) == most)
    end = next((end for end in ends if end.host == lost[0]), ends[0])
    if len(lost) == 1:
        by = ", ".join(sorted(accusers[lost[0]]))
        told = f"host {lost[0]} did not answer {by}: its link or the way to it is broken, or the machine is dead"
    else:
        told = f"hosts {', '.join(lost)} did not answer each other: the way between them is broken"
    return RankFailure(f"{told}; all ranks were ended; {shown_tail(f'its log, {job.log(end.rank)}', end.tail)}", end)
