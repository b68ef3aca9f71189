"""The `direct` launcher: ranks on this machine by Horovod's own rendezvous, without ssh."""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hvdkit.errors import RequestError, RunError
from hvdkit.launch import namespaces
from hvdkit.launch.agents import Guarded, guard_command
from hvdkit.launch.hosts import Slot, check_here, shown
from hvdkit.launch.job import GRACE_S, Job, Tick, prepare
from hvdkit.launch.launchers import elastic
from hvdkit.launch.namespaces import Place
from hvdkit.launch.supervise import supervise

_SERVER = Path(__file__).with_name("rendezvous.py")
_ELASTIC_DRIVER = Path(__file__).with_name("elastic_driver.py")
_START_TIMEOUT_S = 30.0
# Ranks on this machine meet on the loopback interface, whatever the host's name resolves to.
_HERE = Place("lo", "127.0.0.1")


def run(job: Job, on_tick: Tick | None = None) -> None:
    """Run the job to its end; `on_tick` is called every 0.1 s.

    Raises RequestError (a host that is not this machine, no interpreter, an unwritable folder; nothing was started),
    RankFailure or RunError (a rank or the rendezvous failed), Terminated (SIGTERM), KeyboardInterrupt (SIGINT).
    """
    places = _places(job)
    prepare(job)
    if job.elastic is not None:
        elastic.supervise(job, _elastic_driver(job), on_tick, begins_anew=True)
        return
    meeting = places[job.hosts[0].name]
    with _rendezvous(job, meeting) as port:
        commands = []
        for slot in job.slots():
            place = places[slot.hostname]
            environment = _environment(job, slot, place, meeting.address, port)
            commands.append(Guarded("rank", slot.rank, job.command(), environment, enter=place.enter))
        supervise(job, commands, on_tick)


def _places(job: Job) -> dict[str, Place]:
    """Where each host's ranks meet the others, by the host's name. Raises RequestError."""
    check_here(job.hosts, job.np)
    if not any(host.namespace for host in job.hosts):
        return {host.name: _HERE for host in job.hosts}
    namespaces.check(job.hosts, "direct", job.elastic is not None)
    return namespaces.places(job.hosts)


def _environment(job: Job, slot: Slot, place: Place, meeting: str, port: int) -> dict[str, str]:
    """What Horovod reads in a rank's environment; `meeting` is the address of the rendezvous."""
    return {
        "NCCL_SOCKET_IFNAME": place.interface,
        **job.base_environment(),
        "HVDKIT_LAUNCHER": "direct",
        "HOROVOD_HOSTNAME": slot.hostname,
        "HOROVOD_RANK": str(slot.rank),
        "HOROVOD_SIZE": str(slot.size),
        "HOROVOD_LOCAL_RANK": str(slot.local_rank),
        "HOROVOD_LOCAL_SIZE": str(slot.local_size),
        "HOROVOD_CROSS_RANK": str(slot.cross_rank),
        "HOROVOD_CROSS_SIZE": str(slot.cross_size),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": meeting,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
        "HOROVOD_GLOO_IFACE": place.interface,
    }


def _elastic_driver(job: Job) -> Guarded:
    """Horovod's elastic driver under the runtime's interpreter, which starts each rank under a guard of its own."""
    places = [f"{slot.hostname}-{slot.local_rank}" for slot in job.slots()]
    rank = guard_command(str(job.python), "rank", job, GRACE_S, job.command())
    command = [str(job.python), str(_ELASTIC_DRIVER), elastic.settings(job, places), *rank]
    environment = {"NCCL_SOCKET_IFNAME": _HERE.interface, **job.base_environment(), "HVDKIT_LAUNCHER": "direct"}
    return Guarded("horovodrun", None, command, environment, elastic.DRIVER_GRACE_S)


@contextlib.contextmanager
def _rendezvous(job: Job, place: Place) -> Iterator[int]:
    """Horovod's rendezvous server under the runtime's interpreter, since the driver has no Horovod; yields its port.

    It is where all ranks can reach it: on this machine's loopback, or on the first of the hosts.

    The ranks are started after it: a rank that finds no server gives up after 1.5 s, and the server is up in 0.2 s.
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
                start_new_session=True,  # a terminal's Ctrl-C is the launcher's affair
            )
        except OSError as error:
            raise RequestError(
                f"{job.python}: cannot be started ({error.strerror}); build it anew with `hvdkit runtime build`"
            ) from error
        assert server.stdin is not None and server.stdout is not None
        try:
            line = _first_line(server)
            if not line.strip().isdigit():
                errors.seek(0)
                said = errors.read().decode("utf-8", "replace").strip().rpartition("\n")[2] or "it said nothing"
                raise RunError(
                    f"{job.python}: Horovod's rendezvous server did not start: {said}; look with `hvdkit doctor`"
                )
            yield int(line)
        finally:
            server.kill()
            server.wait()
            server.stdin.close()
            server.stdout.close()


def _first_line(server: subprocess.Popen[bytes]) -> bytes:
    """What the server prints first; empty if it ends or takes longer than 30 s."""
    assert server.stdout is not None
    deadline = time.monotonic() + _START_TIMEOUT_S
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(server.stdout, selectors.EVENT_READ)
        while not line.endswith(b"\n") and selector.select(max(0.0, deadline - time.monotonic())):
            data = server.stdout.read1()  # type: ignore[attr-defined]  # a BufferedReader
            if not data:
                break
            line += data
    return line
