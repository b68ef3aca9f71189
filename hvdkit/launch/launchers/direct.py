"""The `direct` launcher: ranks on this machine by Horovod's own rendezvous, without ssh."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from hvdkit.errors import RequestError, RunError
from hvdkit.launch import namespaces
from hvdkit.launch.agents import AgentCommand, agent_command
from hvdkit.launch.hosts import check_here, horovod_environment, shown
from hvdkit.launch.job import Job, Tick, prepare
from hvdkit.launch.launchers import elastic
from hvdkit.launch.namespaces import Place
from hvdkit.launch.supervise import supervise

_SERVER = Path(__file__).with_name("rendezvous.py")
_ELASTIC_DRIVER = Path(__file__).with_name("elastic_driver.py")
_START_TIMEOUT_S = 30.0
# Ranks on this machine use the loopback interface, whatever the host's name resolves to.
_HERE = Place("lo", "127.0.0.1")


def run(job: Job, on_tick: Tick | None = None) -> None:
    """Run the job to its end; `on_tick` is called every 0.1 s.

    Raises RequestError (a host that is not this machine, no interpreter, an unwritable folder; nothing was started),
    RankFailure or RunError (a rank or the rendezvous failed), Terminated (SIGTERM), KeyboardInterrupt (SIGINT).
    """
    places = _places(job)
    prepare(job)
    if job.elastic is not None:
        elastic.supervise(job, _elastic_driver(job), on_tick, restarts=True)
        return
    server = places[job.hosts[0].name]
    with _rendezvous(job, server) as port:
        commands = []
        for slot in job.slots():
            place = places[slot.hostname]
            environment = _environment(job, place) | horovod_environment(slot, server.address, port, place.interface)
            commands.append(AgentCommand(slot.rank, job.command(), environment, enter=place.enter))
        supervise(job, commands, on_tick)


def _places(job: Job) -> dict[str, Place]:
    """The network interface of each host's ranks, by the host's name. Raises RequestError."""
    check_here(job.hosts, job.np)
    if not any(host.namespace for host in job.hosts):
        return {host.name: _HERE for host in job.hosts}
    return namespaces.places(job.hosts)


def _environment(job: Job, place: Place) -> dict[str, str]:
    return {"NCCL_SOCKET_IFNAME": place.interface, **job.base_environment(), "HVDKIT_LAUNCHER": "direct"}


def _elastic_driver(job: Job) -> AgentCommand:
    """Horovod's elastic driver under the runtime's interpreter; it starts each rank under an agent."""
    assert job.elastic is not None
    places = [f"{slot.hostname}-{slot.local_rank}" for slot in job.slots()]
    settings = json.dumps({"np": job.np, "places": places, **asdict(job.elastic)}, default=str)
    rank = agent_command(str(job.python), "rank", job, job.command())
    command = [str(job.python), str(_ELASTIC_DRIVER), settings, *rank]
    return AgentCommand(None, command, _environment(job, _HERE))


@contextlib.contextmanager
def _rendezvous(job: Job, place: Place) -> Iterator[int]:
    """Horovod's rendezvous server, at an address that all ranks reach; yields its port.

    It runs under the runtime's interpreter, as the driver has no Horovod. Ranks are started after it: a rank that finds
    no server gives up after 1.5 s, and the server is up in 0.2 s.
    """
    command = [*place.enter, str(job.python), str(_SERVER), place.address, shown(job.hosts), str(job.np)]
    with tempfile.TemporaryFile() as errors:
        try:
            server = subprocess.Popen(
                command,
                env=job.base_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # a terminal's Ctrl-C reaches only the launcher
            )
        except OSError as error:
            raise RequestError(
                f"{job.python}: cannot be started ({error.strerror}); build it anew with `hvdkit runtime build`"
            ) from error
        with server:
            try:
                assert server.stdout is not None
                ready, _, _ = select.select([server.stdout], [], [], _START_TIMEOUT_S)
                line = server.stdout.readline() if ready else b""
                if not line.strip().isdigit():
                    errors.seek(0)
                    said = errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2] or "it said nothing"
                    raise RunError(
                        f"{job.python}: Horovod's rendezvous server did not start: {said}; look with `hvdkit doctor`"
                    )
                yield int(line)
            finally:
                server.kill()
