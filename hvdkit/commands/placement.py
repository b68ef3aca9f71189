"""Where a command's ranks are to run, and how: what every command that starts ranks checks of its request."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hvdkit.adapters.capabilities import ENVIRONMENT
from hvdkit.core import tuning
from hvdkit.errors import RequestError
from hvdkit.launch import namespaces
from hvdkit.launch.hosts import Host, check_here, parse_hosts
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.runtimes.store import Runtime, find


def check(
    framework: str, np: int, hosts: str | None, launcher: str, stall_timeout_s: float, elastic: bool = False
) -> tuple[Runtime | None, list[Host], list[str]]:
    """The framework's runtime, the hosts of the ranks, and all faults of the request; where there are none, both are
    whole."""
    faults: list[str] = []
    runtime: Runtime | None = None
    placed: list[Host] = []
    try:
        runtime = find(framework)
    except RequestError as error:
        faults.append(str(error))
    try:
        placed = parse_hosts(hosts, np)
        namespaces.check(placed, launcher, elastic)
        if launcher == "direct":
            check_here(placed, np)
    except RequestError as error:
        faults.append(str(error))
    if launcher not in LAUNCHERS:
        faults.append(f"--launcher {launcher}: expected one of {', '.join(LAUNCHERS)}")
    if not 0 <= stall_timeout_s < float("inf"):
        faults.append(f"--stall-timeout {stall_timeout_s}: expected seconds, or 0 to wait for ever")
    faults += _environment(framework, os.environ)
    return runtime, placed, faults


def _environment(framework: str, environment: Mapping[str, str]) -> list[str]:
    """Variables, which the ranks inherit, that would end them before they can say why."""
    found = tuning.faults(environment)
    for name, (expected, pattern) in ENVIRONMENT.get(framework, {}).items():
        if name in environment and not re.fullmatch(pattern, environment[name].strip()):
            found.append(f"{name}: expected {expected}, got {environment[name]!r}; set it anew, or unset it")
    return found
