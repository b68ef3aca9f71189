"""Attacks by a scheduler, a real Slurm of two nodes: cancelled, suspended, queued again, daemons and nodes lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

from tests.trials.places import TRAIN, OnHosts, Place, place, resumes, running_on, same_bits
from tests.trials.trial import HVDKIT, ROOT, attack, expect

# Ranks that a scheduler interrupts need some time: 44 updates take 4 s.
LONG = (*TRAIN[:-1], "checkpoint={every_steps: 5}")


def slurm(where: Place, *command: str) -> str:
    done = where.daemons.run(list(command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)
    expect(done.returncode == 0, f"{' '.join(command)}: {done.stdout}")
    return str(done.stdout)


def job_number(where: Place) -> str:
    return slurm(where, "squeue", "-h", "-o", "%i").split()[0]


def _daemon(where: Place, name: str) -> subprocess.Popen[bytes]:
    """munged, slurmctld, and the slurmd of h1 and h2, in the order of their start."""
    found = where.daemons._daemons[("munged", "slurmctld", "h1", "h2").index(name)]
    assert isinstance(found, subprocess.Popen)
    return found


def _ended_and_resumed(where: Place, job: OnHosts, out: Path) -> str:
    job.ended(90)
    job.sound()
    job.nothing_left(40)
    expect(job.process.returncode != 0 or not (out / "result.json").exists(), job.text())
    lines = [line for line in job.text().splitlines() if "step" not in line[:30]]
    return f"status {job.process.returncode}: {lines[-1] if lines else 'nothing'}; {resumes(where, out)}"


@attack("ends within 40 s and leaves nothing on either node; --resume in a new allocation: the same bits")
def cancelled(folder: Path) -> str:
    """scancel of the allocation in training."""
    with place("slurm") as where, running_on(where, *LONG, out=folder / "run") as job:
        job.trains(12)
        slurm(where, "scancel", job_number(where))
        return _ended_and_resumed(where, job, folder / "run")


@attack("never a silent success: status 1 with a rank named, or a checkpoint and --resume; then the same bits")
def steps_terminated(folder: Path) -> str:
    """scancel --signal=TERM: all ranks' agents get SIGTERM, hvdkit none."""
    with place("slurm") as where, running_on(where, *LONG, out=folder / "run") as job:
        job.trains(12)
        slurm(where, "scancel", "--signal=TERM", job_number(where))
        return _ended_and_resumed(where, job, folder / "run")


@attack(
    "training continues after it, to the same bits; or ranks that are stopped are named; status 1; then the same bits"
)
def suspended(folder: Path) -> str:
    """scontrol suspend for 15 s in training, then resume; --stall-timeout 30."""
    with place("slurm") as where, running_on(where, *LONG, "--stall-timeout", "30", out=folder / "run") as job:
        job.trains(12)
        number = job_number(where)
        slurm(where, "scontrol", "suspend", number)
        time.sleep(15)
        slurm(where, "scontrol", "resume", number)
        if job.ended(90) == 0:
            job.sound()
            return f"status 0; {same_bits(job)}"
        return _ended_and_resumed(where, job, folder / "run")


@attack("training continues: status 0, the same bits")
def daemon_of_a_node_killed(folder: Path) -> str:
    """kill -9 of h2's slurmd in training."""
    with place("slurm") as where, running_on(where, *LONG, out=folder / "run") as job:
        job.trains(12)
        _daemon(where, "h2").kill()
        job.ends(0)
        return same_bits(job)


@attack("training continues: status 0, the same bits; or a line that names srun or Slurm, and nothing is left")
def controller_paused(folder: Path) -> str:
    """SIGSTOP to slurmctld for 20 s from update 12 on."""
    with place("slurm") as where, running_on(where, *LONG, out=folder / "run") as job:
        job.trains(12)
        _daemon(where, "slurmctld").send_signal(signal.SIGSTOP)
        time.sleep(20)
        _daemon(where, "slurmctld").send_signal(signal.SIGCONT)
        job.ends(0)
        return same_bits(job)


@attack("h2, a rank or Slurm is named; not status 0; nothing is left; with h2 back, --resume: the same bits")
def node_down(folder: Path) -> str:
    """scontrol update nodename=h2 state=down in training; it is resumed after the end."""
    with place("slurm") as where, running_on(where, *LONG, out=folder / "run") as job:
        job.trains(12)
        slurm(where, "scontrol", "update", "nodename=h2", "state=down", "reason=fire")
        job.ended(90)
        job.sound()
        job.nothing_left(40)
        expect(job.process.returncode != 0, job.text())
        # Slurm may have taken it back by itself, and then refuses.
        where.daemons.run(["scontrol", "update", "nodename=h2", "state=resume"], stderr=subprocess.DEVNULL)
        time.sleep(5)
        return f"status {job.process.returncode}: {job.text().splitlines()[-1]}; {resumes(where, folder / 'run')}"


@attack(
    "it starts again by itself and ends with the same bits; its log says from which step; no lock stands in its way"
)
def queued_again(folder: Path) -> str:
    """A job by `hvdkit submit --apply`, whose path has blanks and quotes, is queued again (scontrol requeue)."""
    folder = folder / 'it\'s "a" $(touch pwned)'
    folder.mkdir()
    with place("slurm") as where:
        words = ["submit", *LONG[1:], "--nodes", "2", "--time", "10", "--run", str(folder / "run"), "--apply"]
        environment = {**os.environ, **where.environment(), "PYTHONPATH": str(ROOT), "MY_TOKEN": "planted-4711"}
        done = where.daemons.run(
            [*HVDKIT, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder, env=environment
        )
        found = re.search(r"^job (\d+): ", done.stdout, re.MULTILINE)
        expect(found, f"status {done.returncode}\n{done.stdout}")
        assert found
        files = [path.name for path in folder.rglob("*") if path.is_file() and b"planted-4711" in path.read_bytes()]
        expect(not files, f"a value of the environment is in {files}")
        until = time.monotonic() + 120
        state, queued = "", False
        metrics = folder / "run" / "metrics.jsonl"
        while time.monotonic() < until and not (folder / "run" / "result.json").exists():
            if not queued and metrics.exists() and metrics.read_text().count("\n") >= 12:
                slurm(where, "scontrol", "requeue", found[1])
                queued = True
            state = slurm(where, "scontrol", "show", "job", found[1])
            if queued and "JobState=PENDING" in state and "Restarts=1" in state:
                time.sleep(3)
                slurm(where, "scontrol", "update", f"jobid={found[1]}", "StartTime=now")
                time.sleep(3)
            time.sleep(0.2)
        logs = "".join(path.read_text(errors="replace") for path in folder.glob("*.log"))
        expect(queued and (folder / "run" / "result.json").exists(), f"{state}\n{logs}")
        expect(not list(folder.parent.rglob("pwned")), "a part of the path was executed")

        ended = SimpleNamespace(folder=folder / "run", text=lambda: f"{sorted(folder.rglob('*'))}\n{logs}")
        return f"{[line for line in logs.splitlines() if 'step' in line][:1]}; {same_bits(ended)}"
