"""Which rank runs where, and the variables in which Horovod finds it.

Standard library only, and no syntax newer than Python 3.8: agents use it too (agent/rank_agent.py).
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Slot:
    """Where one rank runs: Horovod's six numbers and the host's name.

    `local_*` counts ranks on the same host, `cross_*` the hosts that have a rank with this local_rank.
    """

    hostname: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int


def fill(hosts: Iterable[tuple[str, int]], np: int) -> list[Slot]:
    """One slot for each of `np` ranks, in rank order, on hosts given by name and number of slots.

    Hosts are filled one after the other, as Horovod does it.
    """
    every = ((name, local_rank) for name, slots in hosts for local_rank in range(slots))
    seats = list(itertools.islice(every, np))
    local_size = Counter(name for name, _ in seats)
    peers: dict[int, list[str]] = defaultdict(list)  # by local_rank: the hosts that have it, in order
    for name, local_rank in seats:
        peers[local_rank].append(name)
    return [
        Slot(
            hostname=name,
            rank=rank,
            size=len(seats),
            local_rank=local_rank,
            local_size=local_size[name],
            cross_rank=peers[local_rank].index(name),
            cross_size=len(peers[local_rank]),
        )
        for rank, (name, local_rank) in enumerate(seats)
    ]


def horovod_environment(slot: Slot, address: str, port: int, interface: str) -> dict[str, str]:
    """The variables in which a rank's Horovod finds its slot, and the rendezvous server at `address` and `port`."""
    return {
        **{f"HOROVOD_{field.name.upper()}": str(getattr(slot, field.name)) for field in fields(Slot)},
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": address,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": interface,
    }
