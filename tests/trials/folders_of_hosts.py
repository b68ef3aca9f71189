"""Attacks on what two hosts share or do not: one folder, its lock, disks, names of folders, and the way by ssh."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.trials.places import TRAIN, OnHosts, Place, place, ran_on, running_on, same_bits
from tests.trials.trial import Running, attack, expect, ran

LOCAL = (*TRAIN, "--launcher", "direct")
HOSTILE = 'it\'s "a" $(touch pwned) `touch pwned`; touch pwned & #'


def _refused(job: Running, *words: str) -> str:
    """The one line of a refusal: status 2, with these words."""
    job.sound()
    expect(job.process.returncode == 2, f"status {job.process.returncode}\n{job.text()}")
    lines = [line for line in job.text().splitlines() if all(word in line for word in words)]
    expect(len(lines) == 1 and len(job.text().splitlines()) <= 3, f"no such line, or more than it:\n{job.text()}")
    return lines[0]


@attack("the second is refused with status 2 and the first one's process and host; the first trains on: the same bits")
def one_folder(folder: Path) -> str:
    """hvdkit trains from h1 (horovodrun, two hosts); another one is started on h2 into the same folder."""
    with place("horovodrun") as where, running_on(where, *TRAIN, out=folder / "run") as job:
        job.trains(5)
        second = ran_on(where, *LOCAL, "--overwrite", out=folder / "run", host="h2")
        seen = _refused(second, "another run is writing there")
        expect(job.ended() == 0, job.text())
        return f"{seen}; {same_bits(job)}"


@attack("refused in one line that names the folder; the first trains on: the same bits")
def script_in_its_folder(folder: Path) -> str:
    """hvdkit trains; a recipe's script is started into the same folder without hvdkit, as on another host."""
    import subprocess

    with place("horovodrun") as where, running_on(where, *TRAIN, out=folder / "run") as job:
        job.trains(5)
        command = [".runtimes/mxnet/bin/python", "recipes/mxnet/resnet.py", "recipes/resnet20-digits.yaml", "epochs=1"]
        done = subprocess.run(
            [*where.prefix("h2"), *command, "--out", str(folder / "run")],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, "HOROVOD_GLOO_IFACE": "lo"},  # no name service knows h2
            timeout=120,
        )
        expect(
            done.returncode not in (0, -11) and str(folder / "run") in done.stderr and "Traceback" not in done.stderr,
            f"status {done.returncode}\n{done.stderr}",
        )
        expect(job.ended() == 0, job.text())
        return f"status {done.returncode}: {done.stderr.strip().splitlines()[-1]}; {same_bits(job)}"


def _left(folder: Path) -> Path:
    """The lock of a run that was killed."""
    with place("horovodrun") as where, running_on(where, *TRAIN, out=folder / "run", host="h1") as job:
        job.trains(8)
        for pid in job.pids():
            os.kill(pid, signal.SIGKILL)
        job.nothing_left()
    lock = folder / "run" / ".lock"
    expect(lock.exists(), "no lock is left")
    return lock


def _of_elsewhere(lock: Path, age_s: float) -> None:
    """The lock becomes one of a machine with another boot, last renewed so long ago."""
    text = json.loads(lock.read_text())
    lock.write_text(json.dumps({**text, "host": "elsewhere", "boot": "0" * 36}))
    os.utime(lock, (time.time() - age_s,) * 2)


@attack("refused while it may be alive, with its host and the time; after 60 s it is taken over, said, and resumed")
def lock_of_a_dead_host(folder: Path) -> str:
    """The lock of a run on another machine that was killed: renewed 5 s ago, then 70 s ago."""
    lock = _left(folder)
    _of_elsewhere(lock, 5)
    early = _refused(ran(*LOCAL, "--resume", out=folder / "run"), "another run is writing there", "elsewhere")
    _of_elsewhere(lock, 70)
    late = ran(*LOCAL, "--resume", out=folder / "run")
    late.sound()
    expect(late.process.returncode == 0 and "elsewhere" in late.text(), late.text())
    return f"{early}; {same_bits(late)}"


@attack(
    "each is refused or taken over in one line, without its control characters; nothing outside of the folder changes"
)
def forged_locks(folder: Path) -> str:
    """The lock is a pipe, a folder, a link to a file elsewhere, 50 MB long, or names a host of control characters."""
    precious, seen = folder / "precious", []
    precious.write_text("precious")

    def huge(lock: Path) -> None:
        with lock.open("wb") as file:
            file.truncate(50_000_000)

    kinds: dict[str, Callable[[Path], object]] = {
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
        "link": lambda lock: lock.symlink_to(precious),
        "huge": huge,
        "control": lambda lock: lock.write_text(
            json.dumps(
                {"host": "\x1b]0;pwned\x07", "pid": 1, "started": 1, "boot": "\x1b[2J", "pids": "x", "since": "y"}
            )
        ),
    }
    for kind, make in kinds.items():
        out = folder / kind
        out.mkdir()
        make(out / ".lock")
        job = ran(*LOCAL, "steps=2", out=out, seconds=60)
        job.sound()
        expect(job.process.returncode in (0, 2), f"{kind}: status {job.process.returncode}\n{job.text()}")
        expect(precious.read_text() == "precious", f"{kind}: the file elsewhere was changed")
        seen.append(f"{kind}: status {job.process.returncode}")
    return ", ".join(seen)


@attack("refused in one line that names the folder, before a rank trains; status 2; nothing is left on either host")
def not_shared(folder: Path) -> str:
    """Rank 0 is to run on h2, which does not see the run's folder."""
    with place("horovodrun") as where:
        out = where.folder / "apart" / "run"
        with running_on(where, *TRAIN, "-H", "10.77.0.2:1,10.77.0.1:1", out=out) as job:
            job.ended()
            job.nothing_left()
            expect(not (out / "metrics.jsonl").exists(), "it has trained")
            return _refused(job, str(out), "not the launcher's folder")


def _hostile(kind: str, folder: Path) -> str:
    out = folder / HOSTILE / "run"
    out.parent.mkdir()
    with place(kind) as where, running_on(where, *TRAIN, "epochs=1", out=out) as job:
        job.ends(0, 2)
        pwned = [str(path) for root in (folder, Path(__file__).parents[2], Path.home()) for path in root.glob("pwned")]
        expect(not pwned, f"executed: {pwned}")
        expect(job.process.returncode == 2 or job.result()["np"] == 2, job.text())
        return job.last()


for _kind in ("direct", "horovodrun", "mpirun", "mpich", "slurm"):

    def _one(folder: Path, kind: str = _kind) -> str:
        return _hostile(kind, folder)

    _one.__name__, _one.__module__ = f"{_kind}_hostile_name", __name__
    _one.__doc__ = f"{_kind}, two hosts: --out has blanks, quotes, backticks, $( ), a semicolon and a hash."
    attack("trained there, or refused in one line; nothing of the name is executed on either host")(_one)


def _by_ssh(folder: Path, kind: str, prepare: Callable[[Place], object], *more: str) -> OnHosts:
    with place(kind) as where:
        prepare(where)
        with running_on(where, *TRAIN, "epochs=1", *more, out=folder / "run") as job:
            job.ended(170)
            job.sound()
            job.nothing_left()
    return job


def _talks(where: Place) -> None:
    """Every login prints a title, a colour and a line, on both streams."""
    with (where.folder / "sshd_config").open("a") as file:
        file.write(
            "ForceCommand printf '\\033]0;pwned\\007\\033[2JHello\\n'; printf '\\033]0;pwned\\007\\033[2JMail\\n' >&2; "
            'eval "$SSH_ORIGINAL_COMMAND"\n'
        )
    for daemon in where.daemons._daemons:
        daemon.send_signal(signal.SIGHUP)
    time.sleep(2)


def _ssh_does(text: str) -> Callable[[Place], object]:
    return lambda where: (where.folder / "ssh").write_text(f"#!/bin/sh\n{text}\n")


@attack("trained, status 0; no raw control character on the terminal")
def horovodrun_talkative_logins(folder: Path) -> str:
    """Each login by ssh prints escape sequences and lines on both streams; under horovodrun."""
    job = _by_ssh(folder, "horovodrun", _talks)
    expect(job.process.returncode == 0, f"status {job.process.returncode}\n{job.text()}")
    return job.text().splitlines()[-1]


@attack("trained, status 0, or the line that ended it is shown; no raw control character on the terminal")
def mpirun_talkative_logins(folder: Path) -> str:
    """Each login by ssh prints escape sequences and lines on both streams; under Open MPI's mpirun."""
    job = _by_ssh(folder, "mpirun", _talks)
    expect(job.process.returncode in (0, 1), f"status {job.process.returncode}\n{job.text()}")
    return f"status {job.process.returncode}: {job.text().splitlines()[-1]}"


@attack("status 1 or 2 within 150 s and a line that names the host and ssh; nothing is left")
def horovodrun_ssh_hangs(folder: Path) -> str:
    """ssh connects and says nothing, for ever; under horovodrun."""
    job = _by_ssh(folder, "horovodrun", _ssh_does("exec sleep 1000"))
    expect(job.process.returncode in (1, 2), f"status {job.process.returncode}\n{job.text()}")
    return job.line("10.77.0.2|ssh")


@attack("status 1 within 150 s and a line that names what hangs; nothing is left")
def mpirun_ssh_hangs(folder: Path) -> str:
    """ssh connects and says nothing, for ever; under Open MPI's mpirun."""
    job = _by_ssh(folder, "mpirun", _ssh_does("exec sleep 1000"), "--stall-timeout", "20")
    expect(job.process.returncode in (1, 2), f"status {job.process.returncode}\n{job.text()}")
    return job.line("10.77.0.2|ssh|mpirun")


@attack("status 1 or 2 and a line with ssh's own words, without control characters; nothing is left")
def horovodrun_ssh_refuses(folder: Path) -> str:
    """ssh ends with status 255 and words with escape sequences in them; under horovodrun."""
    job = _by_ssh(
        folder, "horovodrun", _ssh_does("printf '\\033]0;pwned\\007Permission denied (publickey).\\n' >&2; exit 255")
    )
    expect(job.process.returncode in (1, 2), f"status {job.process.returncode}\n{job.text()}")
    return job.line("10.77.0.2|ssh|Permission")
