"""A task that a scheduler's program has started, such as srun or mpirun, becomes a rank.

The task finds its number in the program's variables, and in `HVDKIT_LAUNCH` (JSON) what the launcher says: the
`program`, the `hosts` (a list of names and slots), `np`, the `addresses` of the launcher's machine, the port of its
`rendezvous` server, and the port for `reports` with its `secret` (hvdkit/handshake.py). In an elastic run the elastic
driver has set Horovod's variables for the worker, with that port: only who is reached how is left to find out.
Standard library only, and no syntax newer than Python 3.8: see rank_agent.py.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

from hvdkit import handshake
from hvdkit.launch.agent.interfaces import interface_in, interface_of
from hvdkit.launch.slots import Slot, fill, horovod_environment

VARIABLE = "HVDKIT_LAUNCH"
# Which task this is: hvdkit's own variable (Ray), Slurm's, Open MPI's, and that of others with PMI, such as MPICH.
_NUMBERS = ("HVDKIT_TASK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_CONNECT_S = 10.0


class NotARank(Exception):
    """The task cannot become a rank; the text says why, in one line."""


def become_rank() -> None:
    """Set Horovod's variables in this process, and lead its standard output to the launcher. Raises NotARank."""
    launch = json.loads(os.environ.pop(VARIABLE))
    slot = None if os.environ.get("HOROVOD_ELASTIC") == "1" else _slot(launch)
    connection, address = _connected(launch["addresses"], launch["reports"], launch["secret"])
    interface = _interface(connection.getsockname()[0], address)
    os.dup2(connection.fileno(), 1)
    connection.close()
    os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    if slot is None:
        os.environ.update(HOROVOD_GLOO_RENDEZVOUS_ADDR=address, HOROVOD_GLOO_IFACE=interface)
    else:
        os.environ.update(horovod_environment(slot, address, launch["rendezvous"], interface))


def _interface(own: str, other: str) -> str:
    """The interface of HOROVOD_GLOO_IFACE, a name or a network; without it, the one by which `own` reaches `other`."""
    wanted = os.environ.get("HOROVOD_GLOO_IFACE")
    if wanted and "/" not in wanted:
        return wanted
    interface = interface_in(wanted) if wanted else interface_of(own)
    if interface is None:
        what = f"an address in {wanted} (HOROVOD_GLOO_IFACE)" if wanted else f"{own}, from which {other} is reached"
        raise NotARank(f"{socket.gethostname()}: no interface has {what}")
    return interface


def _slot(launch: dict[str, Any]) -> Slot:
    """Where this task runs, by its number."""
    program = launch["program"]
    # mpirun in a Slurm allocation starts its daemons by srun: its tasks have Slurm's variables too, of the daemon.
    names = [name for name in _NUMBERS if name in os.environ and not (program != "srun" and name == "SLURM_PROCID")]
    if not names:
        raise NotARank(f"{program} has not set one of {', '.join(_NUMBERS)}")
    slot = fill(launch["hosts"], launch["np"])[int(os.environ[names[0]])]
    local = os.environ.get("SLURM_LOCALID" if program == "srun" else "OMPI_COMM_WORLD_LOCAL_RANK")
    node = os.environ.get("SLURMD_NODENAME") if program == "srun" else None
    if node not in (None, slot.hostname) or local not in (None, str(slot.local_rank)):
        raise NotARank(
            f"{program} has put task {slot.rank} on {node or socket.gethostname()} as number {local} there, expected "
            f"number {slot.local_rank} on {slot.hostname}"
        )
    return slot


def _connected(addresses: list[str], port: int, secret: str) -> tuple[socket.socket, str]:
    """A connection to the first of the launcher's addresses that answers, and this address."""
    faults = []
    for address, seconds in _attempts(addresses):
        try:
            connection = handshake.connect(address, port, secret, seconds)
            connection.settimeout(None)
            handshake.notice_loss(connection)
            return connection, address
        except OSError as error:
            faults.append(f"{address}: {error.strerror or error}")
    raise NotARank(f"the launcher cannot be reached at port {port} of {'; '.join(dict.fromkeys(faults))}")


def _attempts(addresses: list[str]) -> Iterator[tuple[str, float]]:
    """Each address for a moment, then each with patience."""
    yield from ((address, 1.0) for address in addresses)
    yield from ((address, _CONNECT_S) for address in addresses)
