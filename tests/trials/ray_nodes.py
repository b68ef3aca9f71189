"""Attacks on runs under Ray: a cluster of two nodes on this machine. hvdkit has to run where Ray is installed."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.trials.places import nobody_watches, same_bits, secrets_found
from tests.trials.trial import ROOT, Running, attack, expect, running

TRAIN = (
    "train", "resnet20-digits", "-np", "4", "--framework", "mxnet", "model.name=resnet8", "epochs=3",
    "log_every=1", "tune=none", "threads=1", "--launcher", "ray", "checkpoint={every_steps: 3}",
)  # fmt: skip
UPDATES = 33


class Cluster:
    """Two nodes of two CPUs each; `order("kill")` ends the second one, `order("add")` brings it back."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process, self.address = process, address

    def order(self, what: str) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        expect(self.process.stdout.readline() == "done\n", "the cluster does not answer")


@contextmanager
def cluster() -> Iterator[Cluster]:
    expect(importlib.util.find_spec("ray"), "Ray is not installed here: pip install 'hvdkit[ray]'")
    with subprocess.Popen(
        [sys.executable, str(ROOT / "tests" / "cluster" / "ray_cluster.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdin and process.stdout
        said = process.stdout.readline().split()
        expect(len(said) == 2, "Ray does not start")
        try:
            yield Cluster(process, said[0])
        finally:
            with suppress(OSError):
                process.stdin.close()
            process.wait(60)


def of_the_run(job: Running) -> list[int]:
    """All processes with the run's folder on their command line, agents too: Ray has started those, without a mark."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and str(job.folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


def ranks(job: Running) -> dict[int, int]:
    """The processes of ranks."""
    found = {}
    for pid in of_the_run(job):
        with suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
            rank = re.search(rb"\0HOROVOD_RANK=(\d+)\0", Path(f"/proc/{pid}/environ").read_bytes())
            if rank and b"/agent/" not in words and b"hvdkit\0train" not in words:
                found[int(rank[1])] = pid
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _gone(job: Running) -> None:
    job.until(lambda: not of_the_run(job), 40, "the end of all ranks")


def _failed(job: Running) -> str:
    job.ends(1, seconds=90)
    _gone(job)
    return job.line(r"^rank \d+ on ")[:150]  # each start adds to a text of its own


def _resumed(found: Cluster, out: Path, train: tuple[str, ...] = TRAIN) -> str:
    with running(*train, "--resume", out=out, RAY_ADDRESS=found.address) as job:
        job.ends(0)
        _gone(job)
        words = tuple(word for word in train if word not in ("--launcher", "ray"))
        return same_bits(job, words)


@attack("each time the rank, its node or hvdkit's end is said, nothing is left, and --resume leads to the same bits")
def killed(folder: Path) -> str:
    """kill -9, one after the other with --resume: a rank, an agent, an actor of Ray, hvdkit itself."""
    seen = []
    with cluster() as found:
        more: tuple[str, ...] = ()
        for number, what in enumerate(("rank", "agent", "actor", "hvdkit")):
            with running(*TRAIN, *more, out=folder / "run", RAY_ADDRESS=found.address) as job:
                job.trains(5 + 6 * number)
                rank = ranks(job)[2]
                pid = {
                    "rank": rank,
                    "agent": parent(rank),
                    "actor": parent(parent(parent(rank))),
                    "hvdkit": job.process.pid,
                }[what]
                os.kill(pid, signal.SIGKILL)
                if what == "hvdkit":
                    job.process.wait()
                    _gone(job)
                else:
                    seen.append(f"{what}: {_failed(job)}")
            more = ("--resume",)
        return f"{'; '.join(seen)}; {_resumed(found, folder / 'run')}"


@attack("rank 2 is named as the one that hangs; SIGTERM writes a checkpoint, status 0; the same bits at the end")
def stopped_and_terminated(folder: Path) -> str:
    """SIGSTOP to rank 2 with --stall-timeout 15, --resume, SIGTERM to hvdkit, --resume."""
    train = (*TRAIN, "epochs=12")  # a signal is noticed after some seconds
    with cluster() as found:
        with running(*train, "--stall-timeout", "15", out=folder / "run", RAY_ADDRESS=found.address) as job:
            job.trains(5)
            os.kill(ranks(job)[2], signal.SIGSTOP)
            seen = _failed(job)
            expect("rank 2" in seen, job.text())
        with running(*train, "--resume", out=folder / "run", RAY_ADDRESS=found.address) as job:
            job.trains(12)
            job.process.send_signal(signal.SIGTERM)
            status = job.ended(60)
            job.sound()
            expect(status == 0 and "--resume" in job.text(), f"status {status}\n{job.text()}")
            _gone(job)
        return f"{seen}; {_resumed(found, folder / 'run', train)}"


@attack(
    "a rank of the node is named; not status 0; nothing is left; with the node back --resume leads to the same bits"
)
def node_lost(folder: Path) -> str:
    """The second node is killed with all that runs there; it comes back after the end; --resume."""
    with cluster() as found:
        with running(*TRAIN, out=folder / "run", RAY_ADDRESS=found.address) as job:
            job.trains(8)
            found.order("kill")
            seen = _failed(job)
        found.order("add")
        return f"{seen}; {_resumed(found, folder / 'run')}"


@attack(
    "training goes on with two ranks within 30 s, and with four after the node is back; status 0; recoveries says so"
)
def elastic_node_lost(folder: Path) -> str:
    """An elastic run of 2 to 4 ranks: the second node is killed at update 8 and comes back 10 s later."""
    words = (*TRAIN, "epochs=20", "elastic={min_np: 1, max_np: 4, commit_every: 1}")
    with cluster() as found, running(*words, out=folder / "run", RAY_ADDRESS=found.address) as job:
        job.trains(8)
        before = job.updates()
        found.order("kill")
        start = time.monotonic()
        job.until(lambda: job.updates() > before + 5 or job.process.poll() is not None, 60, "training with two")
        took = time.monotonic() - start
        time.sleep(10)
        found.order("add")
        job.ends(0)
        _gone(job)
        found_there = [(each["why"], each["np_before"], each["np"]) for each in job.result()["recoveries"]]
        expect(found_there and found_there[0] == ("lost", 4, 2), str(found_there))
        return f"after {took:.0f} s; {found_there}"


@attack("none of them, and no secret of the job, is on a command line, on the terminal or in a file of the run")
def secrets(folder: Path) -> str:
    """A token, a password and a W&B key are in the environment; user nobody reads all command lines of the run."""
    planted = {
        "GITHUB_TOKEN": "planted-token-4711",
        "DB_PASSWORD": "planted pass'word$(4712)",
        "WANDB_API_KEY": "4713" + "a" * 36,
    }
    with cluster() as found, nobody_watches(folder) as lines:
        with running(*TRAIN, "epochs=1", out=folder / "run", RAY_ADDRESS=found.address, **planted) as job:
            job.trains(3)
            kept = secrets_found(of_the_run(job)) | {name: value.encode() for name, value in planted.items()}
            expect(job.ended() == 0, job.text())
            job.sound()
        lines += []
    for name, value in kept.items():
        where = [line[:300] for line in lines if value in line]
        files = [str(path) for path in job.folder.rglob("*") if path.is_file() and value in path.read_bytes()]
        expect(not where, f"{name} is on a command line: {where[:1]}")
        expect(not files and value.decode() not in job.text(), f"{name} is in {files or 'the terminal'}")
    return f"{len(lines)} command lines; {sorted(kept)}"
