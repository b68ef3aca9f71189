"""The `mpirun` launcher: MPI's own program starts a task for each rank, on any hosts that it reaches."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Mapping

from hvdkit.errors import RequestError
from hvdkit.launch.agent.interfaces import ways_from
from hvdkit.launch.hosts import Host, check_slots, parse_hosts, read_hostfile, shown
from hvdkit.launch.job import Job, Tick, prepare
from hvdkit.launch.launchers import MPI_HOSTFILE, slurm, tasks
from hvdkit.programs import said

_TIMEOUT_S = 60.0
_NAMES_S = 60.0
# What the launcher of MPICH and Intel MPI says of itself; Open MPI's follows its name.
_HYDRA = ("HYDRA", "Intel(R) MPI")
# Open MPI's daemon on another host notices within a minute that mpirun's machine is lost; by default in eight.
_KEEPALIVE = {
    "OMPI_MCA_oob_tcp_keepalive_time": "20",  # s
    "OMPI_MCA_oob_tcp_keepalive_intvl": "10",  # s
    "OMPI_MCA_oob_tcp_keepalive_probes": "4",
}


def hosts(option: str | None, np: int) -> list[Host]:
    """The hosts: those of -H, of an MPIJob's host file, of a Slurm allocation, or this machine.

    Raises RequestError where they have fewer slots than ranks.
    """
    in_pods = MPI_HOSTFILE.exists()
    if option is not None or not (in_pods or "SLURM_JOB_NODELIST" in os.environ):
        return parse_hosts(option, np)
    listed = read_hostfile(MPI_HOSTFILE) if in_pods else slurm.allocation()
    check_slots(np, listed, f"{MPI_HOSTFILE if in_pods else 'the Slurm allocation'} has", "give a smaller -np, or -H")
    if in_pods:
        _wait_for_names(listed)
    return listed


def run(job: Job, on_tick: Tick | None = None) -> None:
    """As `Launcher.run`; every host needs the interpreter, the script and hvdkit under the same paths."""
    shown_version = version()
    options = _hydra if any(mark in shown_version for mark in _HYDRA) else _open_mpi
    prepare(job)
    added = {name: os.environ.get(name, value) for name, value in _KEEPALIVE.items()}
    tasks.run(job, "mpirun", lambda names: ["mpirun", *options(job, names)], "mpirun", _others(job), on_tick, **added)


def version() -> str:
    """What `mpirun --version` prints. Raises RequestError where there is no mpirun, or one that does not work."""
    if shutil.which("mpirun") is None:
        raise RequestError("--launcher mpirun: mpirun: not found; install Open MPI or MPICH, or load its module")
    remedy = "run that by hand; load another MPI, or what this one needs"
    return said(["mpirun", "--version"], _TIMEOUT_S, "--launcher mpirun: `mpirun --version`", remedy)


def _open_mpi(job: Job, environment: Mapping[str, str]) -> list[str]:
    """Options of Open MPI, whose tasks on other hosts have no other variables than those named."""
    exported = [word for name in tasks.passed(job, environment) for word in ("-x", name)]
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    # hvdkit pins ranks itself, where it was asked to.
    return [*root, "-np", str(job.np), "-H", shown(job.hosts), "--map-by", "slot", "--bind-to", "none",
            "--stdin", "none", *exported]  # fmt: skip


def _hydra(job: Job, environment: Mapping[str, str]) -> list[str]:
    """Options of Hydra, MPICH's and Intel MPI's, which passes its whole environment on.

    Its helpers on other hosts get this host's address: its name may be unknown there, or mean a loopback address.
    """
    here = [] if job.here else ["-localhost", ways_from(_others(job))[0]]
    return [*here, "-np", str(job.np), "-hosts", shown(job.hosts), "-bind-to", "none"]


def _others(job: Job) -> list[str]:
    return [host.name for host in job.hosts if not host.here]


def _wait_for_names(listed: list[Host]) -> None:
    """Wait until the name service knows all hosts: new pods are ready before it does. Raises RequestError."""
    until = time.monotonic() + _NAMES_S
    for host in listed:
        while True:
            try:
                socket.getaddrinfo(host.name, None)
                break
            except OSError:
                if time.monotonic() > until:
                    raise RequestError(
                        f"{MPI_HOSTFILE}: {host.name}: no address for this name within {_NAMES_S:.0f} s; look at the "
                        "workers with `kubectl get pods`"
                    ) from None
                time.sleep(0.5)
