"""Hosts and their slots."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hvdkit import paths, programs
from hvdkit.errors import Faults, RequestError
from hvdkit.files import read_bounded
from hvdkit.launch.slots import Slot, fill

# No name has a meaning to a shell or looks like an option: horovodrun passes names to ssh through a shell.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}")
_SLOTS = re.compile(r"[0-9]{1,6}")
_EXAMPLE = "expected host:slots, for example worker-0:2,worker-1:2"
_HOSTFILE_LINE = re.compile(
    rf"(?P<name>{_NAME.pattern})(:(?P<a>[0-9]{{1,6}}))?( slots ?= ?(?P<b>[0-9]{{1,6}}))?( max[-_]slots ?= ?[0-9]+)?"
)
_NAMESPACE = "netns:"
_DISCOVERY_S = 20.0
MOST_A_CORE = 64  # ranks; more is a typing error, which would overload the machine


@dataclass(frozen=True)
class Host:
    """A machine by name or IPv4 address, and how many ranks may run on it.

    A `namespace` is one of this machine's networks, with its name in `ip netns`.
    """

    name: str
    slots: int
    namespace: bool = False

    @property
    def here(self) -> bool:
        """Whether it is this machine."""
        return self.namespace or is_this_machine(self.name)


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
    if "/" in text:
        try:
            hosts = {host.name: host for host in read_hostfile(paths.expanded(text))}
        except RequestError as fault:
            raise RequestError(f"-H {fault}") from None
    faults = Faults()
    for entry in [] if hosts else text.split(","):
        with faults.collected():
            host = _parse_entry(entry)
            if host.name in hosts:
                raise RequestError(f"-H: {entry!r}: host {host.name} is named twice; name it once, with all its slots")
            hosts[host.name] = host
    faults.report()
    slots = sum(host.slots for host in hosts.values())
    if np > slots:
        raise RequestError(
            f"-np {np}: -H offers {slots} {'slot' if slots == 1 else 'slots'} ({shown(list(hosts.values()))}); "
            f"ask for at most {slots} or add slots"
        )
    return list(hosts.values())


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


def check_here(hosts: list[Host], np: int) -> None:
    """Check that all hosts are this machine, and that it can run `np` ranks. Raises RequestError."""
    for host in hosts:
        if not host.here:
            raise RequestError(
                f"-H: {host.name} is not this machine, and the direct launcher starts ranks here only; "
                "use --launcher horovodrun"
            )
    cores = len(os.sched_getaffinity(0))
    if np > MOST_A_CORE * cores:
        raise RequestError(
            f"-np {np}: expected at most {MOST_A_CORE * cores} ranks on this machine, {MOST_A_CORE} a core; for others "
            "give -H and --launcher horovodrun"
        )


def discovered(script: Path, here: bool) -> list[Host]:
    """The hosts that a host discovery script prints now, host:slots a line; `here`: all have to be this machine.

    As to Horovod, a host's last line counts. Raises RequestError where the script cannot be run, fails, takes longer
    than 20 s or prints anything else, more than 1 MiB, or more slots than this machine can have.
    """
    where = f"--host-discovery-script {script.absolute()}:"
    try:
        done = programs.answer([script.absolute()], _DISCOVERY_S)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise RequestError(f"{where} {error.strerror}; expected host:slots a line, and an end") from None
        raise RequestError(f"{where} cannot be run ({error.strerror}); expected #! and an interpreter first") from error
    except subprocess.TimeoutExpired:
        raise RequestError(f"{where} expected it to end within {_DISCOVERY_S:.0f} s, better within one") from None
    if done.returncode != 0:
        said = done.stderr.strip().rpartition("\n")[2][:200]
        raise RequestError(f"{where} failed with status {done.returncode}: {said or 'it said nothing'}")
    by_name: dict[str, Host] = {}
    for line in filter(None, map(str.strip, done.stdout.splitlines())):
        try:
            host = _parse_entry(line)
            by_name[host.name] = host
        except RequestError:
            raise RequestError(f"{where} expected host:slots a line, got {line[:80]!r}") from None
    hosts = list(by_name.values())
    others = [host.name for host in hosts if here and not is_this_machine(host.name)]
    if others:
        raise RequestError(f"{where} {', '.join(others)}: not this machine; use --launcher horovodrun")
    slots, most = sum(host.slots for host in hosts), MOST_A_CORE * len(os.sched_getaffinity(0))
    if here and slots > most:
        raise RequestError(f"{where} expected at most {most} slots on this machine, {MOST_A_CORE} a core, got {slots}")
    return hosts


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


def place(hosts: list[Host], np: int) -> list[Slot]:
    """One slot for each of `np` ranks, in rank order: hosts are filled one after the other, as Horovod does it."""
    return fill([(host.name, host.slots) for host in hosts], np)


def _parse_entry(entry: str) -> Host:
    """One `host:slots`; RequestError says what is wrong with it."""
    shown_entry = repr(entry if len(entry) <= 80 else entry[:77] + "...")
    if not entry:
        raise RequestError(f"-H: an empty entry; {_EXAMPLE}")
    namespace = entry.startswith(_NAMESPACE) and entry.count(":") > 1
    name, colon, slots = entry.removeprefix(_NAMESPACE if namespace else "").rpartition(":")
    if not colon:
        raise RequestError(f"-H: {shown_entry}: no number of slots; {_EXAMPLE}")
    if ":" in name or name.startswith("["):
        raise RequestError(f"-H: {shown_entry}: Horovod takes no IPv6 address; give the host's name or IPv4 address")
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"-H: {shown_entry}: the host's name may have only letters, digits, '.', '-' and '_', "
            f"and begins with none of '.' and '-'; {_EXAMPLE}"
        )
    if not _SLOTS.fullmatch(slots) or int(slots) < 1:
        raise RequestError(f"-H: {shown_entry}: slots must be a whole number, 1 or more (up to 6 digits); {_EXAMPLE}")
    return Host(name, int(slots), namespace)
