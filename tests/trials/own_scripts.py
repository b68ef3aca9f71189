"""Attacks by scripts of one's own: what a task may do to its process, its terminal and the machine."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

from tests.trials.trial import ROOT, Running, attack, expect, running

DEBUGGING = ROOT / "tests" / "debugging"
SCRIPT = """import os, signal, sys, threading, time
import sound
RANK = sound.RANK
class Faulty(sound.Points):
    def fault(self, step):
        {code}
sound.run(Faulty)
"""


def task(folder: Path, code: str, *more: str) -> tuple[str, ...]:
    """The words that train a task whose loss does this in each step."""
    (folder / "own").mkdir(exist_ok=True)
    for name in ("sound.py", "recipe.yaml"):
        shutil.copy(DEBUGGING / name, folder / "own" / name)
    (folder / "own" / "faulty.py").write_text(SCRIPT.format(code=code.replace("\n", "\n        ")))
    return ("train", str(folder / "own" / "recipe.yaml"), "model.script=faulty.py", "-np", "2", *more)


def trained(folder: Path, code: str, *more: str, seconds: float = 120, **environment: str) -> Running:
    with running(*task(folder, code, *more), out=folder / "run", **environment) as job:
        job.ends(seconds=seconds)
        job.nothing_left(20)
    return job


def end(job: Running, status: int, *words: str) -> str:
    job.ends(status)
    return job.line(*words) if words else job.last()


@attack("status 0; the child is gone 20 s after the end")
def leaves_a_daemon(folder: Path) -> str:
    """Rank 1 forks twice, with a session of its own and closed descriptors, and the grandchild sleeps for an hour."""
    code = """if step == 12 and RANK == 1 and os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        for number in (signal.SIGTERM, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
        time.sleep(3600)
    os._exit(0)"""
    return end(trained(folder, code), 0)


@attack("ends within 120 s: with status 0 and a result, or the rank that does not end is named")
def never_ends(folder: Path) -> str:
    """Rank 1 starts a thread that is no daemon and never ends; --stall-timeout 10."""
    code = "if step == 12 and RANK == 1: threading.Thread(target=time.sleep, args=(3600,)).start()"
    job = trained(folder, code, "--stall-timeout", "10")
    return end(job, 0) if job.process.returncode == 0 else end(job, 1, "rank 1")


@attack("status 0; hvdkit itself stays below 200 MiB")
def floods(folder: Path) -> str:
    """Both ranks print 300 MB without a line's end, and then 100 MB of empty lines."""
    code = """if step == 12:
    for _ in range(300): os.write(1, b"x" * 1000000)
    for _ in range(100): os.write(2, b"\\n" * 1000000)"""
    most = 0
    with running(*task(folder, code), out=folder / "run") as job:
        while job.process.poll() is None:
            try:
                status = Path(f"/proc/{job.process.pid}/status").read_text()
                most = max(
                    most, *(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmRSS")), 0
                )
            except OSError:
                pass
            time.sleep(0.05)
        job.ended()
        job.sound()
    expect(most < 200, f"hvdkit took {most} MiB")
    return f"{most} MiB; {end(job, 0)}"


@attack("rank 1 and its exception are named; status 1; no raw control character")
def colourful_exception(folder: Path) -> str:
    """Rank 1 raises an exception whose class and text hold escape sequences, right-to-left marks and 100 kB."""
    code = """if step == 12 and RANK == 1:
    raise type("Bad\\x1b[2J", (Exception,), {})("\\x1b]0;pwned\\x07\\u202e\\u2028" + "y" * 100000)"""
    job = trained(folder, code)
    expect(len(job.text()) < 50_000, f"{len(job.text())} characters on the terminal")
    for raw in ("\x1b[2J", "\u202e", "\u2028"):
        expect(raw not in job.text(), f"{raw!r} is on the terminal raw")
    return end(job, 1, "rank 1")


@attack("trained: status 0, a result and its files, readable by the user")
def changes_surroundings(folder: Path) -> str:
    """Each rank goes to another folder, sets umask 0777, empties its environment and removes its script and recipe."""
    code = """if step == 12:
    os.chdir("/"); os.umask(0o777); os.environ.clear()
    for name in ("faulty.py", "recipe.yaml"):
        try: os.remove(os.path.join(os.path.dirname(sound.__file__), name))
        except OSError: pass"""
    job = trained(folder, code)
    seen = end(job, 0)
    for name in ("result.json", "metrics.jsonl"):
        expect((job.folder / name).stat().st_mode & 0o400, f"{name} is {oct((job.folder / name).stat().st_mode)}")
    return seen


@attack("ends within 60 s of SIGTERM, and says how; not with status 0 unless a checkpoint was written")
def ignores_sigterm(folder: Path) -> str:
    """Both ranks ignore SIGTERM and SIGINT from the first step on and take 1 s a step; hvdkit gets SIGTERM."""
    code = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(1)"
    with running(*task(folder, code), out=folder / "run") as job:
        job.trains(4)
        job.process.send_signal(signal.SIGTERM)
        status = job.ended(60)
        job.sound()
        job.nothing_left(20)
    expect(status != 0 or (job.folder / "checkpoints").exists(), f"status 0\n{job.text()}")
    return job.last()


@attack("rank 1 is named with what is wrong (too many open files, or its end); status 1")
def no_more_files(folder: Path) -> str:
    """Rank 1 lowers its limit of open files to those that it has, at step 12 of 30, with a checkpoint every 5."""
    code = "if step == 12 and RANK == 1:\n    import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))"
    job = trained(folder, code, "checkpoint={every_steps: 5}")
    return end(job, 0) if job.process.returncode == 0 else end(job, 1, "rank 1")


@attack("rank 0 or 1 is named; status 1; no silence and no hang")
def closes_all_files(folder: Path) -> str:
    """Rank 1 closes all of its descriptors above 2 at step 12, Horovod's sockets too."""
    job = trained(folder, "if step == 12 and RANK == 1: os.closerange(3, 5000)", "--stall-timeout", "15")
    return end(job, 1, "rank")


@attack("status 1 and the rank's own exception, though its hook raises another")
def broken_hook(folder: Path) -> str:
    """Rank 1 sets sys.excepthook to a function that raises, and sys.stderr to None; then it raises ValueError."""
    code = """if step == 12 and RANK == 1:
    sys.excepthook = lambda *_: 1 / 0; sys.stderr = None
    raise ValueError("the first cause")"""
    return end(trained(folder, code), 1, "rank 1")


@attack("a child that trains on as a copy of rank 1 is no second rank 1: ends within 120 s, nothing is left")
def forks_in_training(folder: Path) -> str:
    """Rank 1 forks at step 12; the child returns into the training loop."""
    job = trained(folder, "if step == 12 and RANK == 1: os.fork()", "--stall-timeout", "15")
    return end(job, job.process.returncode)


@attack("refused in one line before ranks start, or trained; nothing of the name is executed")
def hostile_script_name(folder: Path) -> str:
    """The script's name has blanks, quotes, $( ), a newline and escape sequences."""
    name, words = 'it\'s $(touch pwned) "a"\n\x1b[2J.py', list(task(folder, "pass"))
    (folder / "own" / "faulty.py").rename(folder / "own" / name)
    words[2] = f"model.script={name}"
    with running(*words, out=folder / "run") as job:
        job.ends(0, 2)
    expect(
        "\x1b[2J" not in job.text() and not list(folder.rglob("pwned")) and not (ROOT / "pwned").exists(), job.text()
    )
    return job.last()
