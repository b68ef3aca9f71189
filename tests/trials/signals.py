"""Attacks by signals: to hvdkit, to agents, to ranks, at all times."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.trials.trial import SMALL, Running, attack, declare, expect, ran, running

KEPT = (*SMALL, "checkpoint={every_steps: 5}")
Act = Callable[[Running], object]


def to_hvdkit(*numbers: int, pause_s: float = 0.0) -> Act:
    """These signals to hvdkit, one after the other."""

    def act(job: Running) -> None:
        for number in numbers:
            if job.process.poll() is None:
                job.process.send_signal(number)
                time.sleep(pause_s)

    return act


def stopped_for(seconds: float, send: Callable[[Running, int], object]) -> Act:
    def act(job: Running) -> None:
        send(job, signal.SIGSTOP)
        time.sleep(seconds)
        send(job, signal.SIGCONT)

    return act


def one_after_the_other(job: Running) -> None:
    for name in ("SIGWINCH", "SIGURG", "SIGCHLD", "SIGPIPE", "SIGUSR1", "SIGUSR2", "SIGALRM"):
        if 1 not in job.ranks():
            break
        job.kill(1, getattr(signal, name))
        time.sleep(0.3)


# By name: what is done, what is expected, the update after which it is done (0: after 0.3 s), more words of the
# command, what does it, the statuses that are right (none: any), and a pattern of the line that is reported.
ATTACKS: dict[str, tuple[str, str, int, tuple[str, ...], Act, tuple[int, ...], str]] = {
    "interrupted_at_once": (
        "SIGINT to hvdkit 0.3 s after its start.",
        "status 130 or by the signal; nothing is left; the line says what to do next",
        0, (), to_hvdkit(signal.SIGINT), (130, -2), "",
    ),
    "interrupted_twice": (
        "SIGINT twice within 0.1 s, in training.",
        "ends within seconds; the second signal does not leave processes",
        20, (), to_hvdkit(signal.SIGINT, signal.SIGINT, pause_s=0.1), (130, -2), "",
    ),
    "terminated_in_training": (
        "SIGTERM to hvdkit at update 33.",
        "a checkpoint of the update at which it stopped, status 0, the line names it and --resume",
        33, (), to_hvdkit(signal.SIGTERM), (0, 143), "--resume",
    ),
    "hung_up": (
        "SIGHUP to hvdkit (its terminal is closed) at update 33.",
        "ends like SIGTERM or like Ctrl-C, and says so; nothing is left",
        33, (), to_hvdkit(signal.SIGHUP), (), "",
    ),
    "rank_terminated": (
        "SIGTERM to rank 1 alone, at update 33.",
        "rank 1 and its signal are named first; status 1; --resume is offered",
        33, (), lambda job: job.kill(1, signal.SIGTERM), (1,), "rank 1",
    ),
    "rank_paused": (
        "SIGSTOP to rank 0 for 8 s, then SIGCONT.",
        "training continues and ends well: a pause shorter than the stall timeout is no failure",
        33, (), stopped_for(8, lambda job, number: job.kill(0, number)), (0,), "",
    ),
    "rank_stopped": (
        "SIGSTOP to rank 0 for good, with --stall-timeout 10.",
        "rank 0 is named as the one that hangs, and that it is stopped; status 1; nothing is left",
        33, ("--stall-timeout", "10"), lambda job: job.kill(0, signal.SIGSTOP), (1,), "rank 0",
    ),
    "hvdkit_paused": (
        "SIGSTOP to hvdkit itself for 15 s with --stall-timeout 10, then SIGCONT.",
        "training is not disturbed: the ranks train on, and hvdkit reports them after it continues",
        10, ("--stall-timeout", "10"), stopped_for(15, lambda job, number: job.process.send_signal(number)), (0,), "",
    ),
    "user_signals": (
        "SIGUSR1, SIGUSR2, SIGWINCH, SIGURG, SIGCHLD, SIGALRM and SIGPIPE to rank 1, one after the other.",
        "ignored by the ranks, or the ranks that end are named; never a silent success without training",
        20, (), one_after_the_other, (0, 1), "",
    ),
}  # fmt: skip


def _signalled(
    folder: Path, update: int, words: tuple[str, ...], act: Act, statuses: tuple[int, ...], said: str
) -> str:
    with running(*KEPT, *words, out=folder / "run") as job:
        job.trains(update) if update else time.sleep(0.3)
        act(job)
        job.ends(*statuses, seconds=120)
        job.nothing_left(15)
    if job.process.returncode == 0 and not said:
        job.result()
    return job.line(said) if said else job.last()


for _name, (_does, _expected, *_how) in ATTACKS.items():
    declare(f"signals.{_name}", _does, _expected, _signalled, *_how)


@attack("ends as after one SIGTERM, or at once; no half-written checkpoint is named last")
def terminated_ten_times(folder: Path) -> str:
    """SIGTERM to hvdkit ten times in a second, at update 33."""
    seen = _signalled(folder, 33, (), to_hvdkit(*[signal.SIGTERM] * 10, pause_s=0.1), (), "step|SIGTERM")
    ran(*KEPT, "--resume", out=folder / "run").ends(0)
    return seen


@attack("ranks end within 15 s; nothing is left; --resume continues")
def hvdkit_killed(folder: Path) -> str:
    """SIGKILL to hvdkit alone, at update 33."""
    with running(*KEPT, out=folder / "run") as job:
        job.trains(33)
        job.process.kill()
        job.nothing_left()
    after = ran(*KEPT, "--resume", out=folder / "run")
    after.ends(0)
    return after.last()


@attack("its rank is named; status 1; nothing is left, also no temporary folder after the next run")
def agent_killed(folder: Path) -> str:
    """SIGKILL to rank 1's agent, at update 33; TMPDIR is a folder of its own, which is empty after the next run."""
    temporary = folder / "tmp"
    temporary.mkdir()
    with running(*KEPT, out=folder / "run", TMPDIR=str(temporary)) as job:
        job.trains(33)
        os.kill(int(Path(f"/proc/{job.ranks()[1]}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
        job.ends(1)
    ran(*KEPT, "--resume", out=folder / "run", TMPDIR=str(temporary))
    left = [path.name for path in temporary.iterdir()]
    expect(not left, f"left behind: {left}")
    return job.line("^rank 1")


@attack("killed at 12 random times of a run: each time --resume continues, and the end has all 88 updates")
def killed_at_any_time(folder: Path) -> str:
    """SIGKILL to all processes of a run, 12 times, 1 to 9 s after their start; --resume each time."""
    drawn, more = random.Random(37), ()
    for _ in range(12):
        with running(*KEPT, *more, out=folder / "run") as job:
            time.sleep(drawn.uniform(1, 9))
            job.end()
        more = ("--resume",) if (folder / "run" / "checkpoints").exists() else ("--overwrite",)
    job = ran(*KEPT, *more, out=folder / "run")
    job.ends(0)
    steps = {json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()}
    expect(steps == set(range(1, 89)), f"updates in metrics.jsonl: {sorted(steps)}")
    left = [path.name for path in (folder / "run").rglob("*") if path.name.endswith(".tmp") or "tmp" in path.suffix]
    expect(not left, f"left behind: {left}")
    return job.last()
