"""A real Slurm on one machine: slurmctld and a slurmd in each of a network's namespaces (hvdkit/launch/namespaces.py).

    with Slurm(network, folder) as slurm:
        slurm.run(["srun", "-N2", "hostname"], stdout=subprocess.PIPE)

Everything of it lives in `folder` and in the network's namespaces: nothing of the machine's own Slurm, if it has one,
is used. Needs root and Debian's slurm-wlm and munge.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

_PROGRAMS = ("munged", "mungekey", "slurmctld", "slurmd", "srun", "sinfo")
_CONTROLLER = "control"
START_S = 30.0


class Slurm:
    """Slurm's daemons on the hosts of `network`, each with `cpus` processors; a context manager.

    The hosts share this machine's files except for the folder `apart`: each but the first has one of its own.
    """

    def __init__(self, network: Any, folder: Path, cpus: int = 2) -> None:
        self.network, self.folder, self.cpus, self.apart = network, folder, cpus, folder / "apart"
        self.environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    @staticmethod
    def missing() -> list[str]:
        """The programs that this machine lacks."""
        return [name for name in _PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]

    def __enter__(self) -> Slurm:
        for name in ("state", "munge", "apart"):
            (self.folder / name).mkdir(parents=True, mode=0o700)
        subprocess.run(["mungekey", f"--keyfile={self.folder}/munge/key"], check=True)
        self._write_configuration()
        # All hosts share this machine's files, and so one munged.
        socket_, munge = self.folder / "munge" / "socket", self.folder / "munge"
        self._start("munged", ["munged", "--foreground", "--force", f"--key-file={munge}/key", f"--socket={socket_}",
                    f"--pid-file={munge}/pid", f"--log-file={munge}/log", f"--seed-file={munge}/seed"])  # fmt: skip
        self._wait("munged", socket_.exists)
        self._start("slurmctld", self._named(_CONTROLLER, ["slurmctld", "-D"]), self.network.names[0])
        first, *others = self.network.names
        self._start(first, self._named(first, ["slurmd", "-D", "-N", first]), first)
        own = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', str(self.apart)]
        for name in others:
            self._start(name, self._named(name, [*own, "slurmd", "-D", "-N", name]), name)
        self._wait("slurmctld", self._all_idle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def run(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command on the first host, with Slurm's configuration in its environment."""
        return self.network.run(
            self._named(self.network.names[0], command), self.network.names[0], **self._with(options)
        )

    def start(self, command: list[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on the first host."""
        return self.network.start(
            self._named(self.network.names[0], command), self.network.names[0], **self._with(options)
        )

    def log(self, daemon: str) -> str:
        """What a daemon has logged: slurmctld, munged, or a host's name."""
        return (self.folder / f"{daemon}.log").read_text()

    def _with(self, options: dict[str, Any]) -> dict[str, Any]:
        given = options.pop("env", {})
        return {**options, "env": {**self.environment, **given, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}}

    def _named(self, host: str, command: list[str]) -> list[str]:
        """The command under that host's name."""
        return ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host, *command]

    def _start(self, name: str, command: list[str], host: str | None = None) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            options = self._with({"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT})
            self._daemons.append(self.network.start(command, host, start_new_session=True, **options))

    def _wait(self, name: str, ready: Any) -> None:
        until = time.monotonic() + START_S
        while not ready():
            if time.monotonic() > until or any(daemon.poll() is not None for daemon in self._daemons):
                raise RuntimeError(f"Slurm does not start; {name} says:\n{self.log(name)}")
            time.sleep(0.1)

    def _all_idle(self) -> bool:
        shown = self.run(["sinfo", "-h", "-N", "-o", "%t"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return shown.stdout.split() == ["idle"] * len(self.network.names)

    def _write_configuration(self) -> None:
        nodes = "".join(
            f"NodeName={name} NodeAddr=10.77.0.{number} CPUs={self.cpus} State=UNKNOWN\n"
            for number, name in enumerate(self.network.names, 1)
        )
        names = ",".join(self.network.names)
        (self.folder / "slurm.conf").write_text(f"""\
ClusterName=test
SlurmctldHost={_CONTROLLER}(10.77.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={self.folder}/munge/socket
CredType=cred/munge
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
KillWait=10
InactiveLimit=0
{nodes}PartitionName=all Nodes={names} Default=YES MaxTime=60 State=UP OverSubscribe=YES:4
""")
