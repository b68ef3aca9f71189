"""Hosts that are network namespaces of this machine, as `ip netns` names them: -H netns:NAME:slots."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hvdkit.errors import Faults, RequestError
from hvdkit.launch.hosts import Host

FOLDER = Path("/run/netns")  # of iproute2


@dataclass(frozen=True)
class Network:
    """The network of a rank: an interface, its IPv4 address, and the command prefix that enters its namespace."""

    interface: str
    address: str
    enter: tuple[str, ...] = ()


def check(hosts: Iterable[Host], launcher: str, elastic: bool = False) -> None:
    """Check that hosts can be used as namespaces, where one is. Raises RequestError."""
    every = list(hosts)
    if not any(host.namespace for host in every):
        return
    if launcher != "direct":
        raise RequestError(f"-H: netns: --launcher {launcher} enters no namespace; use --launcher direct")
    if elastic:
        raise RequestError("-H: netns: expected hosts by name for an elastic run, whose driver enters no namespace")
    if others := [host.name for host in every if not host.namespace]:
        raise RequestError(f"-H: {others[0]}: expected a namespace (netns:NAME:slots), as the others are")
    places(every)


def places(hosts: Iterable[Host]) -> dict[str, Network]:
    """A place for each host by name; all are namespaces.

    Raises RequestError, naming each, where there is no such namespace, it cannot be entered, or none of its interfaces
    has an address and is up.
    """
    by_host: dict[str, Network] = {}
    faults = Faults()
    for host in hosts:
        with faults.collected():
            by_host[host.name] = _place(host.name)
    faults.report()
    return by_host


def _place(name: str) -> Network:
    where = f"-H: netns:{name}:"
    if not (FOLDER / name).exists():
        there = sorted(path.name for path in FOLDER.iterdir()) if FOLDER.is_dir() else []
        raise RequestError(f"{where} expected one of `ip netns`: {', '.join(there) or 'there is none'}")
    enter = ("nsenter", f"--net={FOLDER / name}", "--")
    # `ip` lives where a user's PATH may not look.
    path = f"{os.environ.get('PATH', '/usr/bin:/bin')}:/usr/sbin:/sbin"
    command = [*enter, "ip", "-json", "-4", "address", "show", "up", "scope", "global"]
    try:
        environment = {**os.environ, "PATH": path}
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=environment, timeout=30)
    except subprocess.TimeoutExpired:
        raise RequestError(f"{where} `ip address` does not answer there; see with `{' '.join(command)}`") from None
    except OSError as error:
        raise RequestError(f"{where} expected nsenter, of util-linux ({error.strerror})") from error
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().rpartition("\n")[2]
        raise RequestError(f"{where} cannot be entered ({said}); root may, or who owns it")
    for link in json.loads(done.stdout or "[]"):
        for address in link.get("addr_info", []):
            return Network(link["ifname"], address["local"], enter)
    raise RequestError(f"{where} expected an interface that is up and has an IPv4 address")
