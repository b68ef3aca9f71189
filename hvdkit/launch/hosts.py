"""Hosts and their slots."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

from hvdkit import paths, programs
from hvdkit.errors import Faults, RequestError
from hvdkit.files import read_bounded

# No name has a meaning to a shell or looks like an option: horovodrun passes names to ssh through a shell.
_NAME = "[A-Za-z0-9_][A-Za-z0-9._-]{0,252}"
_ENTRY = re.compile(rf"(?P<name>{_NAME}):(?P<slots>0*[1-9][0-9]{{0,5}})")
_EXPECTED = (
    "expected host:slots, for example worker-0:2,worker-1:2: the host's name or IPv4 address, of letters, digits, '.', "
    "'-' and '_', and a whole number of slots, 1 or more (up to 6 digits)"
)
_HOSTFILE_LINE = re.compile(
    rf"(?P<name>{_NAME})(:(?P<a>[0-9]{{1,6}}))?( slots ?= ?(?P<b>[0-9]{{1,6}}))?( max[-_]slots ?= ?[0-9]+)?"
)
_DISCOVERY_S = 20.0
MOST_A_CORE = 64  # ranks; more is a typing error, which would overload the machine


class Host(NamedTuple):
    """A machine by name or IPv4 address, and how many ranks may run on it."""

    name: str
    slots: int

    @property
    def here(self) -> bool:
        """Whether it is this machine."""
        return is_this_machine(self.name)


def parse_hosts(text: str | None, np: int) -> list[Host]:
    """The hosts that a command line's `-H text -np np` asks for; without `text`, this machine with `np` slots.

    A `text` with a slash, which no host's name has, is the path of a file of hosts.

    Raises RequestError, naming each faulty entry, and where np is below 1 or above the number of slots.
    """
    if np < 1:
        raise RequestError(f"-np {np}: expected a whole number of ranks, 1 or more")
    if text is None:
        return [Host("localhost", np)]
    hosts: dict[str, Host] = {}
    faults = Faults()
    if "/" in text:
        try:
            hosts = {host.name: host for host in read_hostfile(paths.expanded(text))}
        except RequestError as fault:
            raise RequestError(f"-H {fault}") from None
    for entry in [] if hosts else text.split(","):
        with faults.collected():
            host = _parse_entry(entry)
            if host.name in hosts:
                raise RequestError(f"-H: {entry!r}: host {host.name} is named twice; name it once, with all its slots")
            hosts[host.name] = host
    faults.report()
    check_slots(np, list(hosts.values()), "-H offers", "ask for fewer or add slots")
    return list(hosts.values())


def check_slots(np: int, hosts: list[Host], who: str, remedy: str) -> None:
    """Check that the hosts have slots for np ranks. Raises RequestError: `who` has so many, and what to do."""
    slots = sum(host.slots for host in hosts)
    if np > slots:
        raise RequestError(f"-np {np}: {who} {slots} slot{'s' if slots != 1 else ''} ({shown(hosts)}); {remedy}")


def read_hostfile(path: Path) -> list[Host]:
    """The hosts of a file as Open MPI's and horovodrun's, `name slots=2`, or MPICH's, `name:2`. Raises RequestError."""
    try:
        lines = read_bounded(path, 2**22).decode("utf-8-sig", "replace").splitlines()  # an editor may write a BOM
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"{path}: cannot be read ({reason}); expected a file of hosts") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(lines, 1):
        words = " ".join(line.partition("#")[0].split())
        if not words:
            continue
        match = _HOSTFILE_LINE.fullmatch(words)
        if match is None:
            raise RequestError(f"{path}: line {number}: expected NAME slots=N, got {line.strip()[:80]!r}")
        name, slots = match["name"], int(match["a"] or match["b"] or 1)
        if slots < 1:
            raise RequestError(f"{path}: line {number}: expected 1 slot or more, got {slots}")
        if name in hosts:
            raise RequestError(f"{path}: line {number}: host {name} is named twice; name it once, with all its slots")
        hosts[name] = Host(name, slots)
    if not hosts:
        raise RequestError(f"{path}: expected a host on each line, such as `node1 slots=4`; there is none")
    return list(hosts.values())


def check_here(hosts: list[Host], np: int, where: str = "-H:") -> None:
    """Check that all hosts, given `where`, are this machine, and that it can run `np` ranks. Raises RequestError."""
    if others := [host.name for host in hosts if not host.here]:
        raise RequestError(
            f"{where} {others[0]} is not this machine, and the direct launcher starts ranks here only; "
            "use --launcher horovodrun"
        )
    most = MOST_A_CORE * len(os.sched_getaffinity(0))
    if np > most:
        what = f"-np {np}:" if where == "-H:" else where
        raise RequestError(
            f"{what} expected at most {most} ranks on this machine, {MOST_A_CORE} a core; for others give -H and "
            "--launcher horovodrun"
        )


def discovered(script: Path, here: bool) -> list[Host]:
    """The hosts that a host discovery script prints now, host:slots a line; `here`: all have to be this machine.

    As to Horovod, a host's last line counts. Raises RequestError where the script cannot be run, fails, takes longer
    than 20 s or prints anything else, more than 1 MiB, or more slots than this machine can have.
    """
    where = f"--host-discovery-script {script.absolute()}:"
    remedy = "expected a program that prints host:slots a line, and ends, better within one second"
    printed = programs.said([script.absolute()], _DISCOVERY_S, where.rstrip(":"), remedy)
    hosts: dict[str, Host] = {}
    for line in filter(None, map(str.strip, printed.splitlines())):
        match = _ENTRY.fullmatch(line)
        if match is None:
            raise RequestError(f"{where} expected host:slots a line, got {line[:80]!r}")
        hosts[match["name"]] = Host(match["name"], int(match["slots"]))
    if here:
        check_here(list(hosts.values()), sum(host.slots for host in hosts.values()), where)
    return list(hosts.values())


def shown(hosts: list[Host]) -> str:
    """The hosts in the form of -H: a:2,b:2."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def is_this_machine(name: str) -> bool:
    """Whether a host's name or address is one of this machine's own."""
    try:
        addresses = socket.getaddrinfo(name, 0, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):  # the latter for what can be no name, such as 64 letters without a dot
        return False
    for family, kind, protocol, _, address in addresses:
        # Only an address of this machine can be bound.
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
            return True
    return False


def _parse_entry(entry: str) -> Host:
    """One `host:slots`; RequestError says what is expected."""
    match = _ENTRY.fullmatch(entry)
    if match is None:
        ipv6 = "; Horovod takes no IPv6 address" if entry.count(":") > 1 else ""
        raise RequestError(f"-H: {entry[:80]!r}: {_EXPECTED}{ipv6}")
    return Host(match["name"], int(match["slots"]))
