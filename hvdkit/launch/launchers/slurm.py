"""The `slurm` launcher: srun starts a task for each rank, inside an allocation of salloc or sbatch. No ssh, no PMI."""

from __future__ import annotations

import os
import re
import shutil
import tempfile

from hvdkit.errors import RequestError
from hvdkit.launch.hosts import Host, check_slots, parse_hosts, shown
from hvdkit.launch.job import Job, Tick, prepare
from hvdkit.launch.launchers import tasks
from hvdkit.programs import said

# hvdkit decides when a failed rank ends the others, so srun does not. Steps share the allocation's resources.
STEP = ("--mpi=none", "--kill-on-bad-exit=0", "--wait=0", "--export=ALL", "--overlap", "--quiet")
_TIMEOUT_S = 60.0


def hosts(option: str | None, np: int) -> list[Host]:
    """The hosts of the allocation with a slot for each task; with `option` those named there.

    Raises RequestError without an allocation, or where it has fewer tasks than ranks.
    """
    offered = allocation()
    if option is None:
        check_slots(np, offered, "the Slurm allocation has", f"ask Slurm for -n {np}, or give a smaller -np")
        return offered
    wanted = parse_hosts(option, np)
    if others := [host.name for host in wanted if host.name not in dict(offered)]:
        raise RequestError(f"-H: {', '.join(others)}: not in the allocation, which has {shown(offered)}")
    return wanted


def allocation() -> list[Host]:
    """The hosts of this process's allocation, in Slurm's order. Raises RequestError where there is none."""
    names = os.environ.get("SLURM_JOB_NODELIST")
    if not names:
        raise RequestError("--launcher slurm: expected a Slurm allocation; run this command inside salloc or sbatch")
    if shutil.which("srun") is None:
        raise RequestError("--launcher slurm: srun: not found; install Slurm's client programs")
    expanded = _scontrol("show", "hostnames", names).split()
    counts = os.environ.get("SLURM_TASKS_PER_NODE") or os.environ.get("SLURM_JOB_CPUS_PER_NODE", "1")
    return [Host(name, slots) for name, slots in zip(expanded, _counts(counts), strict=True)]


def run(job: Job, on_tick: Tick | None = None) -> None:
    """As `Launcher.run`; every host needs the interpreter, the script and hvdkit under the same paths."""
    prepare(job)
    names = [slot.hostname for slot in job.slots()]
    nodes = list(dict.fromkeys(names))
    with tempfile.NamedTemporaryFile("w", prefix="hvdkit-tasks-") as places:
        places.writelines(f"{name}\n" for name in names)
        places.flush()
        where = [f"--ntasks={job.np}", f"--nodes={len(nodes)}", "--distribution=arbitrary"]
        if cpus := os.environ.get("SLURM_CPUS_PER_TASK"):  # srun does not take it from the allocation since 22.05
            where.append(f"--cpus-per-task={cpus}")
        command = ["srun", *where, "--input=none", *STEP]
        tasks.run(job, "srun", lambda _: command, "slurm", _addresses(nodes), on_tick, SLURM_HOSTFILE=places.name)


def _addresses(nodes: list[str]) -> list[str]:
    """The nodes' addresses as Slurm knows them, which need no name service; else their names."""
    described = _scontrol("--oneliner", "show", "node", ",".join(nodes))
    address_of = dict(re.findall(r"NodeName=(\S+).*?NodeAddr=(\S+)", described))
    return [address_of.get(name, name) for name in nodes]


def _scontrol(*words: str) -> str:
    """What `scontrol show` prints. Raises RequestError where it fails."""
    return said(("scontrol", *words), _TIMEOUT_S, "scontrol", "look with `scontrol ping`")


def _counts(text: str) -> list[int]:
    """Slurm's `2(x3),1` as 2, 2, 2, 1."""
    items = [re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item) for item in text.split(",")]
    if None in items:
        raise RequestError(f"SLURM_TASKS_PER_NODE: expected such as 2(x3),1, got {text!r}")
    return [int(match[1]) for match in items if match for _ in range(int(match[2] or 1))]
