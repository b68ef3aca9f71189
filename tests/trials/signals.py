"""Attacks by signals: to hvdkit, to agents, to ranks, at all times."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from trial import SMALL, Running, attack, expect, ran, running

KEPT = (*SMALL, "checkpoint={every_steps: 5}")


def last_line(job: Running) -> str:
    lines = job.text().strip().splitlines()
    return f"status {job.process.returncode}: {lines[-1] if lines else 'nothing was printed'}"


def signalled(folder: Path, numbers: list[int], update: int, pause_s: float = 0.0) -> Running:
    """A run whose hvdkit gets these signals after this update (0: at once)."""
    with running(*KEPT, out=folder / "run") as job:
        if update:
            job.trains(update)
        for number in numbers:
            if job.process.poll() is None:
                job.process.send_signal(number)
                time.sleep(pause_s)
        job.ended(60)
        job.sound()
        job.until(lambda: not job.pids(), 15, "the end of all processes")
    return job


@attack("status 130 or by the signal; nothing is left; the line says what to do next")
def interrupted_at_once(folder: Path) -> str:
    """SIGINT to hvdkit 0.3 s after its start."""
    with running(*KEPT, out=folder / "run") as job:
        time.sleep(0.3)
        job.process.send_signal(signal.SIGINT)
        job.ended(60)
        job.sound()
    expect(job.process.returncode in (130, -2), last_line(job))
    return last_line(job)


@attack("ends within seconds; the second signal does not leave processes")
def interrupted_twice(folder: Path) -> str:
    """SIGINT twice within 0.1 s, in training."""
    job = signalled(folder, [signal.SIGINT, signal.SIGINT], 20, 0.1)
    expect(job.process.returncode in (130, -2), last_line(job))
    return last_line(job)


@attack("a checkpoint of the update at which it stopped, status 0, the line names it and --resume")
def terminated_in_training(folder: Path) -> str:
    """SIGTERM to hvdkit at update 33."""
    job = signalled(folder, [signal.SIGTERM], 33)
    expect(job.process.returncode in (0, 143) and "--resume" in job.text(), job.text())
    return last_line(job)


@attack("ends as after one SIGTERM, or at once; no half-written checkpoint is named last")
def terminated_ten_times(folder: Path) -> str:
    """SIGTERM to hvdkit ten times in a second, at update 33."""
    job = signalled(folder, [signal.SIGTERM] * 10, 33, 0.1)
    after = ran(*KEPT, "--resume", out=folder / "run")
    after.sound()
    expect(after.process.returncode == 0, after.text())
    return last_line(job)


@attack("ends like SIGTERM or like Ctrl-C, and says so; nothing is left")
def hung_up(folder: Path) -> str:
    """SIGHUP to hvdkit (its terminal is closed) at update 33."""
    job = signalled(folder, [signal.SIGHUP], 33)
    return last_line(job)


@attack("rank 1 and its signal are named first; status 1; --resume is offered")
def rank_terminated(folder: Path) -> str:
    """SIGTERM to rank 1 alone, at update 33."""
    with running(*KEPT, out=folder / "run") as job:
        job.trains(33)
        job.kill(1, signal.SIGTERM)
        job.ended()
        job.sound()
    expect(job.process.returncode == 1 and "rank 1" in job.text(), job.text())
    return next(line for line in job.text().splitlines() if "rank 1" in line)


@attack("training continues and ends well: a pause shorter than the stall timeout is no failure")
def rank_paused(folder: Path) -> str:
    """SIGSTOP to rank 0 for 8 s, then SIGCONT."""
    with running(*KEPT, out=folder / "run") as job:
        job.trains(33)
        job.kill(0, signal.SIGSTOP)
        time.sleep(8)
        job.kill(0, signal.SIGCONT)
        expect(job.ended() == 0, job.text())
        job.sound()
    return last_line(job)


@attack("rank 0 is named as the one that hangs, and that it is stopped; status 1; nothing is left")
def rank_stopped(folder: Path) -> str:
    """SIGSTOP to rank 0 for good, with --stall-timeout 10."""
    with running(*KEPT, "--stall-timeout", "10", out=folder / "run") as job:
        job.trains(33)
        job.kill(0, signal.SIGSTOP)
        job.ended(60)
        job.sound()
        expect(not [pid for pid in job.pids() if pid != os.getpid()], "processes are left")
    expect(job.process.returncode == 1 and "rank 0" in job.text(), job.text())
    return next(line for line in job.text().splitlines() if "rank 0" in line)


@attack("training is not disturbed: the ranks train on, and hvdkit reports them after it continues")
def hvdkit_paused(folder: Path) -> str:
    """SIGSTOP to hvdkit itself for 15 s with --stall-timeout 10, then SIGCONT."""
    with running(*KEPT, "--stall-timeout", "10", out=folder / "run") as job:
        job.trains(10)
        job.process.send_signal(signal.SIGSTOP)
        time.sleep(15)
        job.process.send_signal(signal.SIGCONT)
        expect(job.ended() == 0, job.text())
        job.sound()
    return last_line(job)


@attack("ranks end within 15 s; nothing is left; --resume continues")
def hvdkit_killed(folder: Path) -> str:
    """SIGKILL to hvdkit alone, at update 33."""
    with running(*KEPT, out=folder / "run") as job:
        job.trains(33)
        job.process.kill()
        job.until(lambda: not job.pids(), 30, "the end of all ranks")
    after = ran(*KEPT, "--resume", out=folder / "run")
    expect(after.process.returncode == 0, after.text())
    return last_line(after)


@attack("its rank is named; status 1; nothing is left, also no temporary folder after the next run")
def agent_killed(folder: Path) -> str:
    """SIGKILL to rank 1's agent, at update 33; TMPDIR is a folder of its own, which is empty after the next run."""
    temporary = folder / "tmp"
    temporary.mkdir()
    with running(*KEPT, out=folder / "run", TMPDIR=str(temporary)) as job:
        job.trains(33)
        parents = [
            int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in job.ranks().values()
        ]
        agents = [pid for pid in parents if pid != job.process.pid]
        expect(agents, "no agents")
        os.kill(agents[-1], signal.SIGKILL)
        job.ended()
        job.sound()
    expect(job.process.returncode == 1 and "rank" in job.text(), job.text())
    ran(*KEPT, "--resume", out=folder / "run", TMPDIR=str(temporary))
    left = [path.name for path in temporary.iterdir()]
    expect(not left, f"left behind: {left}")
    return next(line for line in job.text().splitlines() if "rank" in line and "step" not in line[:30])


@attack("ignored by the ranks, or the ranks that end are named; never a silent success without training")
def user_signals(folder: Path) -> str:
    """SIGUSR1, SIGUSR2, SIGWINCH, SIGURG, SIGCHLD, SIGALRM and SIGPIPE to rank 1, one after the other."""
    with running(*KEPT, out=folder / "run") as job:
        job.trains(20)
        for name in ("SIGWINCH", "SIGURG", "SIGCHLD", "SIGPIPE", "SIGUSR1", "SIGUSR2", "SIGALRM"):
            if 1 not in job.ranks():
                break
            job.kill(1, getattr(signal, name))
            time.sleep(0.3)
        status = job.ended()
        job.sound()
    if status == 0:
        expect((job.folder / "result.json").exists(), job.text())
    else:
        expect("rank 1" in job.text() and "SIG" in job.text(), job.text())
    return last_line(job)


@attack("killed at 12 random times of a run: each time --resume continues, and the end has all 88 updates")
def killed_at_any_time(folder: Path) -> str:
    """SIGKILL to all processes of a run, 12 times, 1 to 9 s after their start; --resume each time."""
    import random

    drawn, more = random.Random(37), ()
    for _ in range(12):
        with running(*KEPT, *more, out=folder / "run") as job:
            time.sleep(drawn.uniform(1, 9))
            job.end()
        more = ("--resume",) if (folder / "run" / "checkpoints").exists() else ("--overwrite",)
    job = ran(*KEPT, *more, out=folder / "run")
    job.sound()
    expect(job.process.returncode == 0, job.text())
    steps = {json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()}
    expect(steps == set(range(1, 89)), f"updates in metrics.jsonl: {sorted(steps)}")
    left = [path.name for path in (folder / "run").rglob("*") if path.name.endswith(".tmp") or "tmp" in path.suffix]
    expect(not left, f"left behind: {left}")
    return last_line(job)
