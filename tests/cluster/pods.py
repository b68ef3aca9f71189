"""Pods as Kubeflow's MPI Operator makes them, on one machine: no Kubernetes, but the manifest's commands and mounts.

A pod is a network namespace (`hvdkit hosts`) with a file system, processes and a host name of its own. What the
operator adds is here: the host file, the keys of ssh, Open MPI's variables (kubeflow/mpi-operator,
pkg/controller/mpi_job_controller.go), and names, which /etc/hosts knows in place of a name service. The image's user
is root under the name hvdkit, since a checkout may be readable for nobody else; what the image has (docker/) is the
checkout's. Needs root, sshd and Open MPI.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.mpijob import MPIJob
from tests.conftest import ROOT

_MPIRUN = "mpirun.openmpi"  # as Debian names it, where MPICH may be the other
_PROGRAMS = ("sshd", "ssh-keygen", _MPIRUN)
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
# Of mpi_job_controller.go: launcherEnvVars and ompiEnvVars.
_LAUNCHER = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}
# $1: the pod's name, $2: the folder of its files, $3: a list of mounts, $4…: the command. All else is the machine's.
_SETUP = """\
set -e
hostname "$1"; files=$2; mounts=$3; shift 3
mount -t tmpfs tmpfs /mnt
mkdir /mnt/etc /mnt/home
cp -a /etc/. /mnt/etc
mount --bind /mnt/etc /etc
mount --bind /home /mnt/home
mount -t tmpfs tmpfs /home
for each in /mnt/home/*/; do
    [ ! -d "$each" ] || { mkdir -p "/home/$(basename "$each")" && mount --bind "$each" "/home/$(basename "$each")"; }
done
mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /usr/local/share
mkdir /run/sshd
cp -a "$files"/. /
while read -r source place; do mkdir -p "$place" && mount --bind "$source" "$place"; done <"$mounts"
mount --bind /home/hvdkit/.ssh /home/hvdkit/.ssh && mount -o remount,ro,bind /home/hvdkit/.ssh
cd /home/hvdkit
exec "$@"
"""


def end(pod: subprocess.Popen[Any]) -> None:
    """Send SIGTERM to a pod's first process, as `kubectl delete` does."""
    [first] = Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()
    os.kill(int(first), signal.SIGTERM)


def missing() -> list[str]:
    """The programs that this machine lacks."""
    return [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]


class Cluster:
    """Pods of the MPIJob in a manifest, on hosts of `network`: the launcher on the first, each worker on another.

    `claims` are the folders of its PersistentVolumeClaims. A pod that is started again has lost its own files.
    """

    def __init__(self, network: Any, manifest: str, folder: Path, claims: dict[str, Path]) -> None:
        self._config, self._job = yaml.safe_load_all(manifest)
        self._network, self._folder, self._claims = network, folder, claims
        job = MPIJob.model_validate(self._job)
        hosts = [line.partition(" ")[0] for line in job.hostfile().splitlines()]
        first = f"{job.metadata.name}-launcher.{job.metadata.name}.{job.metadata.namespace or 'default'}.svc"
        self._names = {name.partition(".")[0]: name for name in dict.fromkeys([first, *hosts])}
        self._write_files(job)

    def start(self, pod: str, **options: Any) -> subprocess.Popen[Any]:
        """Start a pod by its name, with the command and the mounts that the manifest gives it."""
        replicas = self._job["spec"]["mpiReplicaSpecs"]
        launcher = pod.endswith("-launcher")
        spec = replicas["Launcher" if launcher else "Worker"]["template"]["spec"]
        [container] = spec["containers"]
        sources = {volume["name"]: self._source(volume) for volume in spec.get("volumes", [])}
        mounts = self._folder / f"{pod}.mounts"
        mounts.write_text(
            "".join(f"{sources[each['name']]} {each['mountPath']}\n" for each in container.get("volumeMounts", []))
        )
        apart = ["--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc", "--propagation=private"]
        setup = ["unshare", *apart, "sh", "-c", _SETUP, "sh", pod]
        files = self._folder / ("launcher" if launcher else "worker")
        environment = {"HOME": "/home/hvdkit", "PATH": f"{self._folder / 'bin'}:{_PATH}"}
        if launcher:
            environment |= {**_LAUNCHER, "HVDKIT_RUNTIMES": os.environ.get("HVDKIT_RUNTIMES", str(ROOT / ".runtimes"))}
        host = self._network.names[list(self._names).index(pod)]
        return self._network.start(
            [*setup, str(files), str(mounts), *container["command"]], host, env=environment, **options
        )

    def _source(self, volume: dict[str, Any]) -> Path:
        if "configMap" in volume:
            return self._folder / "config"
        return self._claims[volume["persistentVolumeClaim"]["claimName"]]

    def _write_files(self, job: MPIJob) -> None:
        """What the image and the operator put into the pods."""
        program = self._folder / "bin" / "hvdkit"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m hvdkit "$@"\n')
        program.chmod(0o755)
        program.with_name("mpirun").symlink_to(str(shutil.which(_MPIRUN, path=_PATH)))
        config = self._folder / "config"
        config.mkdir()
        for name, text in self._config["data"].items():
            (config / name).write_text(text)
            (config / name).chmod(0o755)
        keys = self._folder / "keys"
        keys.mkdir()
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", str(keys / "id_rsa")], check=True
        )
        shutil.copy(keys / "id_rsa.pub", keys / "authorized_keys")
        passwd = Path("/etc/passwd").read_text()
        known = "".join(
            f"10.77.0.{number} {whole} {short}\n" for number, (short, whole) in enumerate(self._names.items(), 1)
        )
        for kind in ("launcher", "worker"):
            files = self._folder / kind
            for folder in ("etc/ssh/ssh_config.d", "usr/local/share/hvdkit", "home/hvdkit/runs"):
                (files / folder).mkdir(parents=True)
            (files / "etc" / "passwd").write_text(f"hvdkit:x:0:0::/home/hvdkit:/bin/sh\n{passwd}")
            (files / "etc" / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
            shutil.copy(ROOT / "docker" / "ssh_config", files / "etc" / "ssh" / "ssh_config.d" / "hvdkit.conf")
            for name in ("node.sh", "sshd_config"):
                shutil.copy(ROOT / "docker" / name, files / "usr" / "local" / "share" / "hvdkit" / name)
            shutil.copytree(keys, files / "home" / "hvdkit" / ".ssh")
        mpi = self._folder / "launcher" / "etc" / "mpi"
        mpi.mkdir()
        (mpi / "hostfile").write_text(job.hostfile())
        names = [line.partition(" ")[0] for line in job.hostfile().splitlines()]
        (mpi / "discover_hosts.sh").write_text("#!/bin/sh\n" + "".join(f"echo {name}\n" for name in names))
