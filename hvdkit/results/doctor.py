"""The schema of `doctor.json`: what `hvdkit doctor -H …` finds on each host."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from hvdkit.results.json_files import Record, Result


class Interface(Record):
    """A network interface with one of its addresses, of IPv4 or IPv6; `bits` are those of its network."""

    name: str
    address: str
    bits: int


class Route(Record):
    """How the host before this one, in the ring of hosts, reaches one of this host's addresses.

    `source` is the address from which it does, `latency_us` the least time of five connections. Without an answer there
    is a `fault`.
    """

    address: str
    source: str | None = None
    latency_us: float | None = None
    fault: str | None = None


class RuntimeThere(Record):
    """A runtime on a host: versions by package, and a digest of Horovod's libraries; or what is wrong with it."""

    versions: dict[str, str] = Field(default_factory=dict)
    horovod: str | None = None
    fault: str | None = None


class HostReport(Record):
    """One host. Only `name` and `slots` are known of a host that cannot be reached.

    `way` is `ssh`, `srun` or `here`. `interface` and `address` are those by which its neighbour reaches it.
    `folders` are free bytes by folder (None: no such folder), `shares_files` says whether the host sees a file that the
    doctor has written into its --out. `shared_memory` is `works`, or why processes there cannot share memory, as ranks
    of one host do; None: unknown.
    """

    name: str
    slots: int
    way: str
    reachable: bool = False
    hostname: str | None = None
    cores: int | None = None
    memory_bytes: int | None = None
    gpus: list[str] = Field(default_factory=list)
    folders: dict[str, int | None] = Field(default_factory=dict)
    shares_files: bool | None = None
    shared_memory: str | None = None
    hvdkit: str | None = None
    runtimes: dict[str, RuntimeThere] = Field(default_factory=dict)
    resolves: dict[str, list[str]] = Field(default_factory=dict)
    interfaces: list[Interface] = Field(default_factory=list)
    interface: str | None = None
    address: str | None = None
    ways: list[Route] = Field(default_factory=list)

    @property
    def neighbour(self) -> Route | None:
        """The way that was chosen, if the neighbour reaches this host."""
        return next((way for way in self.ways if way.address == self.address and way.fault is None), None)


class HostFault(Record):
    """What is wrong with a host, and what to do. Ranks can run in spite of what is no `fault`."""

    host: str
    what: str
    remedy: str
    fault: bool = True


class HostsReport(Record, Result, file="doctor.json"):
    """`doctor.json`. `runtimes` are those that were compared; `seconds` is what the examination took."""

    hvdkit_version: str
    runtimes: list[str]
    hosts: list[HostReport]
    faults: list[HostFault]
    seconds: float

    @property
    def exit_status(self) -> int:
        """1 if ranks cannot run on these hosts, else 0."""
        return 1 if any(fault.fault for fault in self.faults) else 0

    def records(self) -> list[dict[str, Any]]:
        """A row for each host."""
        return [host.model_dump() for host in self.hosts]
