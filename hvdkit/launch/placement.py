"""Where and how the ranks of a command run, and the checks of it that every command makes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from hvdkit.adapters.capabilities import ENVIRONMENT
from hvdkit.errors import Faults
from hvdkit.launch.hosts import Host, discovered, parse_hosts
from hvdkit.launch.launchers import AUTO, LAUNCHERS, choose
from hvdkit.launch.slots import Slot, fill
from hvdkit.worker import tuning


@dataclass(frozen=True)
class Placement:
    """Where and how ranks run: -np, -H, --launcher, --stall-timeout, --host-discovery-script and --debug of the command
    line.

    The launcher `auto` becomes the one that fits to where this process runs. Nothing is checked when it is made:
    `faults` does that.
    """

    np: int = 1
    hosts_option: str | None = None
    launcher: str = "direct"
    stall_timeout_s: float = 60.0
    discovery: Path | None = None
    debug: bool = False

    def __post_init__(self) -> None:
        if self.launcher == AUTO:
            object.__setattr__(self, "launcher", choose())

    @classmethod
    def of(cls, request: Any, np: int | None = None) -> Self:
        """What a command's request has of these options, for `np` ranks in place of its own."""
        discovery, debug = (getattr(request, name, None) for name in ("host_discovery_script", "debug"))
        options = request.hosts, request.launcher, request.stall_timeout
        return cls(request.np if np is None else np, *options, discovery, bool(debug))

    @cached_property
    def hosts(self) -> list[Host]:
        """The hosts of the ranks; without -H those that the launcher knows. Raises RequestError for a wrong one."""
        if self.launcher not in LAUNCHERS:
            return parse_hosts(self.hosts_option, self.np)
        return LAUNCHERS[self.launcher].hosts(self.hosts_option, self.np)

    @property
    def places(self) -> list[Slot]:
        """Where each rank runs, in rank order."""
        return fill(self.hosts, self.np)

    @cached_property
    def here(self) -> bool:
        """Whether all ranks run on this machine."""
        return all(host.here for host in self.hosts)

    @property
    def crowding(self) -> list[str]:
        """A warning where more ranks than cores run on this machine."""
        cores = len(os.sched_getaffinity(0))
        if not self.here or self.np <= cores:
            return []
        here = f"this machine's {cores} core{'s' if cores > 1 else ''}"
        return [f"-np {self.np}: more ranks than {here}; they wait for each other, so speeds say little"]

    def faults(self, framework: str, elastic: bool, program: bool = False) -> Faults:
        """What is wrong with the options, or with environment variables that ranks of the framework inherit.

        A host discovery script is run once. An elastic `program` runs under horovodrun, which asks no cluster.
        """
        faults, launchers = Faults(), LAUNCHERS.values()
        able = [launcher.name for launcher in launchers if launcher.elastic and not (program and launcher.discovers)]
        with faults.collected():
            _ = self.hosts  # they are read here
        if self.launcher not in LAUNCHERS:
            faults.append(f"--launcher {self.launcher}: expected one of {', '.join((AUTO, *LAUNCHERS))}")
        elif elastic and self.launcher not in able:
            faults.append(f"--launcher {self.launcher}: no elastic runs; expected {' or '.join(able)}")
        elif elastic and LAUNCHERS[self.launcher].discovers:
            why = f"leave it out: an elastic run by --launcher {self.launcher} follows the cluster's own list of hosts"
            given = {"-H": self.hosts_option, "--host-discovery-script": self.discovery}
            faults += [f"{name}: {why}" for name, value in given.items() if value is not None]
        if not 0 <= self.stall_timeout_s < float("inf"):
            faults.append(f"--stall-timeout {self.stall_timeout_s}: expected seconds, or 0 to wait for ever")
        faults += environment_faults(framework, os.environ)
        script = self.discovery
        if script and not elastic:
            faults.append("--host-discovery-script: expected an `elastic` section in the recipe")
        elif script and not (os.access(script, os.X_OK) and script.is_file()):
            faults.append(f"--host-discovery-script {script}: expected a program that prints host:slots a line")
        elif script:
            with faults.collected():
                discovered(script, here=self.launcher == "direct")
        return faults


def environment_faults(framework: str, environment: Mapping[str, str]) -> list[str]:
    """What is wrong with variables that would end the framework's ranks before they can report why."""
    lines = tuning.faults(environment)
    for name, (expected, pattern) in ENVIRONMENT.get(framework, {}).items():
        if name in environment and not re.fullmatch(pattern, environment[name].strip()):
            lines.append(f"{name}: expected {expected}, got {environment[name]!r}; set it anew, or unset it")
    return lines
