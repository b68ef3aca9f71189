"""Which hosts do not reach each other, and the error that names them."""

from __future__ import annotations

from collections import defaultdict

from hvdkit.launch.diagnosis.exits import RankEnd, RankFailure, rank_failure
from hvdkit.launch.job import Job


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
