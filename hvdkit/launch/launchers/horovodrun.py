"""The `horovodrun` launcher: Horovod's own, which reaches other machines by ssh."""

from __future__ import annotations

import os
import re
from collections import Counter
from pathlib import Path

from hvdkit.errors import RequestError
from hvdkit.launch.agent import interfaces
from hvdkit.launch.hosts import Host, discovered, parse_hosts, shown
from hvdkit.launch.job import AgentCommand, Job, Tick, agent_command, prepare
from hvdkit.launch.launchers import elastic
from hvdkit.launch.slots import fill
from hvdkit.launch.supervise import supervise

PROGRAM = Path(__file__).with_name("horovodrun_program.py")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9_./+@%=:,-]*")


def hosts(option: str | None, np: int) -> list[Host]:
    """The hosts, which have to be reached by ssh. Raises RequestError for wrong entries."""
    return parse_hosts(option, np)


def run(job: Job, on_tick: Tick | None = None) -> None:
    """Run the job to its end; `on_tick` is called every 0.1 s.

    Every host needs the interpreter, the script and hvdkit under the paths that they have here, and sees the job's
    folder. Agents report over horovodrun's own channel.

    Raises RequestError (no horovodrun or interpreter, an unwritable folder; nothing was started), RankFailure or
    RunError (a rank or horovodrun failed), Terminated (SIGTERM), KeyboardInterrupt (SIGINT).
    """
    horovodrun = job.python.with_name("horovodrun")
    if not os.access(horovodrun, os.X_OK):  # Horovod is not in this environment
        raise RequestError(f"{horovodrun}: no horovodrun there; use --launcher direct or `hvdkit runtime build`")
    if not job.here and not _PLAIN_PATH.fullmatch(str(Path.cwd())):
        # horovodrun writes `cd <here>` unquoted into the command line of the remote shell.
        raise RequestError(f"{Path.cwd()}: horovodrun cannot run from a folder with such a name; change to another one")
    prepare(job)
    environment = {**job.base_environment(), "HVDKIT_LAUNCHER": "horovodrun"}
    launcher = AgentCommand(None, _command(job), environment)
    if job.elastic is not None:
        elastic.supervise(job, launcher, on_tick)
    else:
        supervise(job, [launcher], on_tick)


def _command(job: Job) -> list[str]:
    """horovodrun's command line: each rank runs under an agent."""
    return [
        str(job.python),
        str(PROGRAM),
        *("-np", str(job.np)),
        *_places(job),
        *_interface(job.environment.get("HOROVOD_GLOO_IFACE")),
        "--gloo",
        *agent_command(str(job.python), "shell-rank", job, job.command()),
    ]


def _interface(wanted: str | None) -> list[str]:
    """The interface of all hosts, by its name here or the network that it is in. Raises RequestError where none is."""
    if wanted is None:
        return []
    name = interfaces.interface_in(wanted) if "/" in wanted else wanted
    if name not in (here := interfaces.names()):
        raise RequestError(f"network interface {wanted}: not on this machine, which has {', '.join(sorted(here))}")
    return ["--network-interfaces", name]


def _places(job: Job) -> list[str]:
    """Which hosts there are, and how many ranks there may be."""
    if job.elastic is None:  # horovodrun starts a rank on every slot, also where there are more than -np
        taken = Counter(place.hostname for place in fill(job.hosts, job.np))
        return ["-H", shown([Host(name, slots) for name, slots in taken.items()])]
    bounds = ["--min-np", str(job.elastic.min_np), "--max-np", str(job.elastic.max_np)]
    # A command of the shell, as horovodrun refuses -H with a single host.
    question, here = "printf '%s\\n' " + " ".join(f"{host.name}:{host.slots}" for host in job.hosts), job.here
    if (script := job.elastic.discovery) is not None:
        question = str(script.absolute())
        here = all(host.here for host in discovered(script, here=False))
    if here:
        bounds += ["--network-interfaces", "lo"]  # else it waits for a second host, to find one that both have
    return ["--host-discovery-script", question, *bounds]
