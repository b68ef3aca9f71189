"""The `direct` launcher: ranks on this machine by Horovod's own rendezvous, without ssh."""

from __future__ import annotations

from hvdkit.launch.hosts import Host, check_here, parse_hosts
from hvdkit.launch.job import AgentCommand, Job, Tick, agent_command, prepare
from hvdkit.launch.serve import rendezvous
from hvdkit.launch.slots import horovod_environment
from hvdkit.launch.supervise import supervise

# Ranks on this machine use the loopback interface, whatever the host's name resolves to.
_INTERFACE, _ADDRESS = "lo", "127.0.0.1"


def hosts(option: str | None, np: int) -> list[Host]:
    """The hosts, which are this machine. Raises RequestError for others."""
    listed = parse_hosts(option, np)
    check_here(listed, np)
    return listed


def run(job: Job, on_tick: Tick | None = None) -> None:
    """As `Launcher.run`."""
    check_here(job.hosts, job.np)
    if job.elastic is not None and job.program:
        from hvdkit.launch.launchers import horovodrun

        horovodrun.run(job, on_tick)  # a program may count on the names of its hosts, and on local ranks
        return
    prepare(job)
    environment = {"NCCL_SOCKET_IFNAME": _INTERFACE, **job.base_environment(), "HVDKIT_LAUNCHER": "direct"}
    if job.elastic is not None:
        from hvdkit.launch.launchers import elastic  # most runs do not need it

        rank = agent_command(str(job.python), "rank", job, job.command())
        names = [f"{slot.hostname}-{slot.local_rank}" for slot in job.slots()]
        elastic.supervise(job, elastic.driver(job, rank, environment, places=names), on_tick)
        return
    with rendezvous(job, _ADDRESS) as port:
        commands = []
        for slot in job.slots():
            added = horovod_environment(slot, _ADDRESS, port, _INTERFACE)
            commands.append(AgentCommand(slot.rank, job.command(), environment | added))
        supervise(job, commands, on_tick)
