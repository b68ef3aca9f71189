"""Attacks on runs over two hosts: by each launcher the same ones, and --resume after each.

direct has tests/cluster/bin/srun enter namespaces; horovodrun and both MPIs use ssh; Slurm has a slurmd on each host.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.trials.places import (
    KINDS,
    TRAIN,
    Place,
    nobody_watches,
    place,
    resumes,
    running_on,
    same_bits,
    secrets_found,
)
from tests.trials.trial import attack, expect

# What starts the other host's ranks, by a pattern of its command line.
STARTERS = {
    "horovodrun": r"^\S*python\S* (-\S+ )*\S*horovodrun_program",
    "mpirun": r"^\S*mpirun",
    "mpich": r"^\S*mpirun",
    "slurm": r"^srun",
}
REACHES = {
    "horovodrun": r"^\S*ssh .*10\.77\.0\.2",
    "mpirun": r"^\S*ssh .*10\.77\.0\.2",
    "mpich": r"^\S*ssh .*10\.77\.0\.2",
    "slurm": r"slurmstepd",
}


def on_two_hosts(
    does: str, expected: str, kinds: tuple[str, ...] = KINDS
) -> Callable[..., Callable[[Place, Path], str]]:
    """Declare an attack for each of these launchers."""

    def declare(function: Callable[[Place, Path], str]) -> Callable[[Place, Path], str]:
        for kind in kinds:

            def one(folder: Path, kind: str = kind) -> str:
                with place(kind) as where:
                    return function(where, folder / "run")

            one.__name__, one.__module__ = f"{kind}_{function.__name__}", __name__
            one.__doc__ = f"{kind}, two hosts: {does}"
            attack(expected)(one)
        return function

    return declare


@on_two_hosts(
    "kill -9 of rank 1 on h2 at update 12; --resume",
    "rank 1 is named, with its host; status 1; nothing is left on either host; the same bits",
)
def rank_killed(where: Place, out: Path) -> str:
    with running_on(where, *TRAIN, out=out) as job:
        job.trains(12)
        job.kill(1)
        seen = job.failed("rank 1", "(h2|10.77.0.2)", "SIGKILL")
    return f"{seen}; {resumes(where, out)}"


@on_two_hosts(
    "kill -9 of the launcher's own program (horovodrun, mpirun, srun) at update 12; --resume",
    "it is named with SIGKILL; status 1; nothing is left on either host; the same bits",
    tuple(STARTERS),
)
def launcher_killed(where: Place, out: Path) -> str:
    with running_on(where, *TRAIN, out=out) as job:
        job.trains(12)
        found = job.named(STARTERS[where.kind], host="h1")
        expect(found, "it is not there")
        for pid in found:
            if pid != job.process.pid:
                os.kill(pid, signal.SIGKILL)
        seen = job.failed(r"horovodrun|mpirun|srun")
    return f"{seen}; {resumes(where, out)}"


@on_two_hosts(
    "kill -9 of what reaches h2 (the ssh client, or Slurm's slurmstepd there) at update 12; --resume",
    "status 1 and a line that names rank 1, h2 or ssh, or trained to the end; nothing is left; the same bits",
    tuple(STARTERS),
)
def way_killed(where: Place, out: Path) -> str:
    with running_on(where, *TRAIN, out=out) as job:
        job.trains(12)
        found = job.named(REACHES[where.kind], host="h2" if where.kind == "slurm" else "h1")
        expect(found, "it is not there")
        for pid in found:
            os.kill(pid, signal.SIGKILL)
        if job.ended() == 0:  # Hydra's helper on h2 needs no ssh any more
            job.sound()
            job.nothing_left()
            return f"status 0; {same_bits(job)}"
        seen = job.failed("rank 1|h2|10.77.0.2|ssh")
    return f"{seen}; {resumes(where, out)}"


@on_two_hosts(
    "kill -9 of rank 1's agent on h2 at update 12; --resume",
    "rank 1 or its host is named; status 1; nothing is left on either host; the same bits",
)
def agent_killed(where: Place, out: Path) -> str:
    with running_on(where, *TRAIN, out=out) as job:
        job.trains(12)
        rank = job.ranks()[1]
        parent = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)
        seen = job.failed("rank 1|h2|10.77.0.2")
    return f"{seen}; {resumes(where, out)}"


@on_two_hosts(
    "kill -9 of hvdkit itself at update 12; --resume at once",
    "all ranks on both hosts end within 30 s; the lock is no obstacle; the same bits",
)
def hvdkit_killed(where: Place, out: Path) -> str:
    with running_on(where, *TRAIN, out=out) as job:
        job.trains(12)
        os.kill(job.hvdkit(), signal.SIGKILL)
        job.nothing_left()
    return resumes(where, out)


@on_two_hosts(
    "SIGTERM to hvdkit at update 12; --resume",
    "a checkpoint, status 0, the line names --resume; nothing is left; the same bits",
)
def terminated(where: Place, out: Path) -> str:
    train = (*TRAIN, "epochs=8")  # a signal is noticed after some seconds
    with running_on(where, *train, out=out) as job:
        job.trains(12)
        os.kill(job.hvdkit(), signal.SIGTERM)
        job.ends(0, seconds=60)
        seen = job.line("--resume")
        job.nothing_left()
    return f"{seen}; {resumes(where, out, train)}"


@on_two_hosts(
    "SIGINT to hvdkit three times within 0.2 s at update 12; --resume",
    "ends within 30 s by SIGINT; nothing is left on either host; the same bits",
)
def interrupted(where: Place, out: Path) -> str:
    with running_on(where, *TRAIN, out=out) as job:
        job.trains(12)
        for _ in range(3):
            if job.process.poll() is None and (found := job.named(r"-m hvdkit train")):
                os.kill(found[-1], signal.SIGINT)
            time.sleep(0.1)
        job.ends(130, -2, seconds=60)
        job.nothing_left()
    return resumes(where, out)


@on_two_hosts(
    "SIGSTOP to rank 1 on h2 at update 12, --stall-timeout 10; --resume",
    "rank 1 is named as the one that hangs, and its host; status 1; nothing is left; the same bits",
)
def rank_stopped(where: Place, out: Path) -> str:
    with running_on(where, *TRAIN, "--stall-timeout", "10", out=out) as job:
        job.trains(12)
        job.kill(1, signal.SIGSTOP)
        seen = job.failed("rank 1", "hang|stopped")
    return f"{seen}; {resumes(where, out)}"


@on_two_hosts(
    "h2's link goes down at update 12, --stall-timeout 30; mended after the end; --resume",
    "status 1 within 150 s, h2 or rank 1 is named; nothing is left on h1 then, and on h2 90 s later but "
    "sshd's or Slurm's sessions; the same bits",
)
def link_cut(where: Place, out: Path) -> str:
    return _lost_link(where, out, where.network.cut)


@on_two_hosts(
    "h2's packets vanish in the switch from update 12 on, --stall-timeout 30; mended after the end; --resume",
    "status 1 within 150 s, h2 or rank 1 is named; nothing is left on h1 then, and on h2 90 s later but "
    "sshd's or Slurm's sessions; the same bits",
)
def packets_lost(where: Place, out: Path) -> str:
    return _lost_link(where, out, where.network.swallow)


def _lost_link(where: Place, out: Path, lose: Callable[[str], None]) -> str:
    with running_on(where, *TRAIN, "--stall-timeout", "30", out=out) as job:
        job.trains(12)
        lose("h2")
        start = time.monotonic()
        status = job.ended(150)
        took = time.monotonic() - start
        job.sound()
        expect(status == 1, f"status {status}\n{job.text()}")
        seen = job.line("rank 1|h2|10.77.0.2")
        if where.kind != "direct":
            job.nothing_left(10, "h1")
        job.nothing_left(90, "h2", sessions=False)  # those end by timeouts of their own
        where.mend()
    if where.kind == "slurm":
        time.sleep(5)  # until slurmctld hears of h2 again
    return f"after {took:.0f} s: {seen}; {resumes(where, out)}"


@on_two_hosts("h2's packets vanish for 6 s at update 12", "training continues; status 0; the same bits")
def packets_lost_for_a_while(where: Place, out: Path) -> str:
    with running_on(where, *TRAIN, out=out) as job:
        job.trains(12)
        where.network.swallow("h2")
        time.sleep(6)
        where.mend()
        job.ends(0)
        job.nothing_left()
        return same_bits(job)


@on_two_hosts(
    "a token, a password and a W&B key are in the environment; user nobody reads all command lines of the run",
    "none of them, and no secret of the job, is on a command line, on the terminal or in a file of the run",
)
def secrets(where: Place, out: Path) -> str:
    planted = {
        "GITHUB_TOKEN": "planted-token-4711",
        "DB_PASSWORD": "planted pass'word\"$(4712)",
        "NOT_SECRET_NAMED": "planted-4714",
        "WANDB_API_KEY": "planted0key4713" + "a" * 25,
    }
    kept: dict[str, bytes] = {name: value.encode() for name, value in planted.items()}
    with nobody_watches(out.parent) as lines, running_on(where, *TRAIN, "epochs=1", out=out, **planted) as job:
        job.trains(3)
        kept |= secrets_found(job.pids())
        expect(job.ended() == 0, job.text())
        job.sound()
    expect(any(b"rank_agent" in line for line in lines), "the watcher saw no agent")
    for name, value in kept.items():
        where_seen = [line[:300] for line in lines if value in line]
        files = [str(path) for path in out.rglob("*") if path.is_file() and value in path.read_bytes()]
        expect(not where_seen, f"{name} is on a command line: {where_seen[0] if where_seen else b''!r}")
        expect(not files and value.decode() not in job.text(), f"{name} is in {files or 'the terminal'}")
    return f"{len(lines)} command lines; not in them, nor in files: {sorted(kept)}"
