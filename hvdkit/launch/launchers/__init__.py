"""The launchers, by the names of the command line's --launcher.

Each is a module of this package with two functions: `hosts`, the hosts that -H and -np ask for, and `run`, which starts
an agent for each rank there and follows all to their end. A program that starts ranks itself, such as srun, is run by
`tasks.run`.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdkit.launch.hosts import Host
    from hvdkit.launch.job import Job, Tick


@dataclass(frozen=True)
class Launcher:
    """One of the modules, loaded at its first use so that `hvdkit --help` stays quick.

    `elastic`: ranks may change; `discovers`: it then follows the cluster's own list of hosts.
    """

    name: str
    elastic: bool = False
    discovers: bool = False

    def hosts(self, option: str | None, np: int) -> list[Host]:
        """The hosts for `np` ranks, of -H where it is given. Raises RequestError where there are not enough slots."""
        chosen: list[Host] = import_module(f"{__name__}.{self.name}").hosts(option, np)
        return chosen

    def run(self, job: Job, on_tick: Tick | None = None) -> None:
        """Run the job to its end, calling `on_tick` every 0.1 s.

        Raises RequestError (nothing was started), RankFailure or RunError (a rank or what starts it failed), Terminated
        (SIGTERM), KeyboardInterrupt (SIGINT).
        """
        import_module(f"{__name__}.{self.name}").run(job, on_tick)


AUTO = "auto"
MPI_HOSTFILE = Path("/etc/mpi/hostfile")  # of the pods of Kubeflow's MPIJob
_ALL = (
    Launcher("direct", elastic=True),
    Launcher("horovodrun", elastic=True),
    Launcher("mpirun"),
    Launcher("slurm"),
    Launcher("ray", elastic=True, discovers=True),
)
LAUNCHERS = {launcher.name: launcher for launcher in _ALL}


def choose() -> str:
    """The launcher for `--launcher auto`: what fits to where this process runs."""
    if MPI_HOSTFILE.exists() and shutil.which("mpirun"):
        return "mpirun"
    if "SLURM_JOB_NODELIST" in os.environ and shutil.which("srun"):
        return "slurm"
    return "direct"
