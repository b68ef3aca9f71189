"""A task that a scheduler's program has started, such as srun or mpirun, becomes a rank.

The task finds its number in the program's variables, and in `HVDKIT_LAUNCH` (JSON) what the launcher says: the
`program`, the `hosts` (a list of names and slots), `np`, the `addresses` of the launcher's machine, the port of its
`rendezvous` server, and the port for `reports`, where the first line has to be the `secret`.

Standard library only, and no syntax newer than Python 3.8: see rank_agent.py.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from typing import Any

from hvdkit.launch.agent.interfaces import interface_of
from hvdkit.launch.slots import Slot, fill, horovod_environment

VARIABLE = "HVDKIT_LAUNCH"
# Which task this is: Slurm's variable, Open MPI's, and the one of MPICH, Intel MPI and others with PMI.
_NUMBERS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_CONNECT_S = 10.0


class NotARank(Exception):
    """The task cannot become a rank; the text says why, in one line."""


def become_rank() -> None:
    """Set Horovod's variables in this process, and lead its standard output to the launcher. Raises NotARank."""
    launch = json.loads(os.environ.pop(VARIABLE))
    slot = _slot(launch)
    connection, address = _connected(launch["addresses"], launch["reports"])
    connection.sendall(launch["secret"].encode() + b"\n")
    interface = interface_of(connection.getsockname()[0])
    if interface is None:
        raise NotARank(f"no interface has the address {connection.getsockname()[0]}, from which {address} is reached")
    os.dup2(connection.fileno(), 1)
    connection.close()
    found = horovod_environment(slot, address, launch["rendezvous"], interface)
    if "HOROVOD_GLOO_IFACE" in os.environ:  # a user knows better
        del found["HOROVOD_GLOO_IFACE"]
    os.environ.setdefault("NCCL_SOCKET_IFNAME", os.environ.get("HOROVOD_GLOO_IFACE", interface))
    os.environ.update(found)


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


def _connected(addresses: list[str], port: int) -> tuple[socket.socket, str]:
    """A connection to the first of the launcher's addresses that answers, and this address."""
    faults = []
    for address, seconds in _attempts(addresses):
        try:
            return socket.create_connection((address, port), seconds), address
        except OSError as error:
            faults.append(f"{address}: {error.strerror or error}")
    raise NotARank(f"the launcher cannot be reached at port {port} of {'; '.join(dict.fromkeys(faults))}")


def _attempts(addresses: list[str]) -> Iterator[tuple[str, float]]:
    """Each address for a moment, then each with patience."""
    yield from ((address, 1.0) for address in addresses)
    yield from ((address, _CONNECT_S) for address in addresses)
