"""The schema of `debug.json`."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hvdkit.results.json_files import Count, Record, Result


class Problem(Record):
    """A warning or an error, as rank `rank`'s log has it (`name` is the log's name)."""

    name: str
    text: str


class RankLog(Record):
    """What Horovod, NCCL and Gloo have logged in one rank: `lines` of them, in debug/`name`.log.

    `rank` and `host` are what Horovod says. `device` is Gloo's network device with its `interface` and `addresses`,
    which the other ranks connect to; `nccl_interface` is NCCL's first. `ways` counts NCCL's channels to other ranks by
    how they go: P2P/…, SHM/…, NET/Socket/0, NET/IB/0. A key that the log does not tell is None or empty.
    """

    name: str
    lines: Count
    rank: Count | None = None
    host: str | None = None
    device: str | None = None
    interface: str | None = None
    addresses: str | None = None
    nccl_interface: str | None = None
    ways: dict[str, int] = Field(default_factory=dict)
    first_problem: str | None = None


class DebugLog(Record, Result, file="debug.json", of="what a run with --debug has written"):
    """`debug.json`: what the logs of a run with --debug come to.

    `controller` and `cpu_operations` are Horovod's (GLOO or MPI), `nccl` is NCCL's version and `network` what it sends
    by between hosts (Socket, IB, …), None without it. `rings` are orders of ranks: NCCL's channels as it logs them,
    else Gloo's ring, which goes by rank. `between_hosts` counts the hops of the first ring from one host to another.
    `first_problem` is the earliest warning or error, by the clocks of the hosts, as far as lines have a time.
    """

    controller: str | None
    cpu_operations: str | None
    nccl: str | None
    network: str | None
    rings: list[list[int]]
    between_hosts: Count | None
    first_problem: Problem | None
    ranks: list[RankLog]

    def records(self) -> list[dict[str, Any]]:
        """A row for each rank."""
        return [rank.model_dump(exclude={"ways"}) for rank in self.ranks]
