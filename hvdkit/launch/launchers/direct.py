"""The `direct` launcher: ranks on this machine by Horovod's own rendezvous, without ssh."""

from __future__ import annotations

from hvdkit.launch import namespaces
from hvdkit.launch.agent_command import AgentCommand, agent_command
from hvdkit.launch.hosts import Host, check_here, parse_hosts
from hvdkit.launch.job import Job, Tick, prepare
from hvdkit.launch.namespaces import Network
from hvdkit.launch.serve import rendezvous
from hvdkit.launch.slots import horovod_environment
from hvdkit.launch.supervise import supervise

# Ranks on this machine use the loopback interface, whatever the host's name resolves to.
_HERE = Network("lo", "127.0.0.1")


def hosts(option: str | None, np: int) -> list[Host]:
    """The hosts, which are this machine or its network namespaces. Raises RequestError for others."""
    listed = parse_hosts(option, np)
    check_here(listed, np)
    return listed


def run(job: Job, on_tick: Tick | None = None) -> None:
    """Run the job to its end; `on_tick` is called every 0.1 s.

    Raises RequestError (a host that is not this machine, no interpreter, an unwritable folder; nothing was started),
    RankFailure or RunError (a rank or the rendezvous failed), Terminated (SIGTERM), KeyboardInterrupt (SIGINT).
    """
    places = _places(job)
    prepare(job)
    if job.elastic is not None:
        from hvdkit.launch.launchers import elastic  # most runs do not need it

        rank = agent_command(str(job.python), "rank", job, job.command())
        names = [f"{slot.hostname}-{slot.local_rank}" for slot in job.slots()]
        driver = elastic.driver(job, rank, _environment(job, _HERE), places=names)
        elastic.supervise(job, driver, on_tick)
        return
    server = places[job.hosts[0].name]
    with rendezvous(job, server.address, server.enter) as port:
        commands = []
        for slot in job.slots():
            place = places[slot.hostname]
            environment = _environment(job, place) | horovod_environment(slot, server.address, port, place.interface)
            commands.append(AgentCommand(slot.rank, job.command(), environment, enter=place.enter))
        supervise(job, commands, on_tick)


def _places(job: Job) -> dict[str, Network]:
    """The network interface of each host's ranks, by the host's name. Raises RequestError."""
    check_here(job.hosts, job.np)
    if not any(host.namespace for host in job.hosts):
        return {host.name: _HERE for host in job.hosts}
    return namespaces.places(job.hosts)


def _environment(job: Job, place: Network) -> dict[str, str]:
    return {"NCCL_SOCKET_IFNAME": place.interface, **job.base_environment(), "HVDKIT_LAUNCHER": "direct"}
