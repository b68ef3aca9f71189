"""Two hosts on one machine, as attacks need them: namespaces with a link each, and what starts ranks on them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.cluster.hosts import Network
from tests.cluster.slurm_daemons import Slurm
from tests.cluster.sshd_daemons import Sshd
from tests.trials.resumed import bits
from tests.trials.trial import ROOT, Running, expect, ran

# 44 updates of two ranks, one on each host.
TRAIN = (
    "train", "resnet20-digits", "-np", "2", "--framework", "mxnet", "model.name=resnet8", "epochs=2",
    "log_every=1", "tune=none", "threads=1", "checkpoint={every_steps: 5}",
)  # fmt: skip
KINDS = ("direct", "horovodrun", "mpirun", "mpich", "slurm")
_NOBODY = """
import os, sys, time
seen, until = set(), time.monotonic() + 300
while time.monotonic() < until and os.getppid() != 1 and not os.path.exists(sys.argv[1]):
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    seen.add(file.read())
            except OSError:
                pass
    time.sleep(0.01)
sys.stdout.buffer.write(b"\\n".join(seen))
"""


class _Apart(Sshd):
    """Hosts that are reached by ssh; the second has a folder `apart` of its own."""

    def _named(self, host: str, command: list[str]) -> list[str]:
        if host == "h1":
            return super()._named(host, command)
        apart = str(self.folder / "apart")
        own = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs tmpfs "$0" && exec "$@"', apart]
        return super()._named(host, [*own, *command])


class Place:
    """Two hosts, h1 and h2; what runs on them and how ranks are started there."""

    def __init__(self, kind: str, folder: Path, network: Any, daemons: Any) -> None:
        self.kind, self.folder, self.network, self.daemons = kind, folder, network, daemons
        holder = Path(f"/proc/{network._holder.pid}/ns/net").readlink()
        spaces = [
            network.run(["readlink", "/proc/self/ns/net"], name, stdout=subprocess.PIPE, text=True).stdout.strip()
            for name in network.names
        ]
        self._spaces = dict(zip(("", *network.names), (str(holder), *spaces), strict=True))
        self.daemons_pids = self.alive()

    def alive(self, host: str | None = None) -> set[int]:
        """The processes on a host, or on both."""
        wanted = {self._spaces[host]} if host else set(self._spaces.values())
        found = set()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and str((entry / "ns" / "net").readlink()) in wanted:
                    found.add(int(entry.name))
        return found

    def prefix(self, host: str = "h1") -> tuple[str, ...]:
        """The words before a command that runs on this host."""
        if self.kind == "direct":
            return tuple(self.network.command([]))
        allocation = ["salloc", "--quiet", "-N2", "-n2"] if self.kind == "slurm" else []
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', host, *allocation]
        return tuple(self.network.command(named, host))

    def words(self) -> tuple[str, ...]:
        """hvdkit's options."""
        if self.kind == "slurm":
            return ()
        hosts = self.network.hosts_option(1) if self.kind == "direct" else self.daemons.option(1)
        return ("--launcher", {"mpich": "mpirun", "direct": "slurm"}.get(self.kind, self.kind), "-H", hosts)

    def environment(self) -> dict[str, str]:
        path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
        if self.kind == "slurm":
            return {"PATH": path, "SLURM_CONF": self.daemons.environment["SLURM_CONF"]}
        return {"PATH": f"{self.folder}:{path}"}

    def mend(self) -> None:
        """Both links carry packets again."""
        self.network.mend("h2")
        self.network.run(["ip", "link", "set", "to-h2", "master", "switch"], check=True)


@contextmanager
def place(kind: str) -> Iterator[Place]:
    """Two hosts for ranks of a launcher; all of it is gone at the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hvdkit-place-")))
        network = stack.enter_context(Network(2, 1000.0, control=kind == "direct"))
        if kind == "slurm":
            folder /= "slurm"
            daemons = stack.enter_context(Slurm(network, folder))
        else:
            (folder / "apart").mkdir()
            daemons = _Apart(network, folder)
            if kind != "direct":
                stack.enter_context(daemons)
            program = shutil.which({"mpirun": "mpirun.openmpi", "mpich": "mpirun.mpich"}.get(kind, "true"))
            script = folder / "mpirun"  # no link: MPICH looks for its other programs beside its own name
            script.write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            script.chmod(0o755)
        yield Place(kind, folder, network, daemons)


class OnHosts(Running):
    """A command of hvdkit on the first host of a place."""

    def __init__(
        self, where: Place, words: tuple[str, ...], out: Path, environment: dict[str, str], host: str = "h1"
    ) -> None:
        self.place, self._before = where, where.alive()
        given = () if "--launcher" in words else where.words()
        more = given[:2] if "-H" in words else given
        super().__init__((*words, *more), out, where.prefix(host), {**where.environment(), **environment})

    def pids(self) -> list[int]:
        return sorted(self.place.alive() - self._before)

    def named(self, *marks: str, host: str | None = None) -> list[int]:
        """The job's processes whose command line has all of these."""
        found = []
        for pid in sorted(self.place.alive(host) - self._before):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if all(re.search(mark, words) for mark in marks):
                    found.append(pid)
        return found

    def hvdkit(self) -> int:
        """The process of hvdkit itself."""
        found = self.named(r"^\S*python\S* -m hvdkit train")
        expect(found, f"hvdkit does not run\n{self.text()}")
        return found[-1]

    def nothing_left(self, seconds: float = 30, host: str | None = None, sessions: bool = True) -> None:
        """Wait until no process of the job is there, and no session of sshd's or Slurm's. Raises `Unexpected`,
        with their command lines."""
        until = time.monotonic() + seconds
        while left := set(self.named("" if sessions else r"^(?!sshd: |slurmstepd: )", host=host)):
            if time.monotonic() > until:
                words = [
                    Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:200]
                    for pid in left
                    if Path(f"/proc/{pid}").exists()
                ]
                expect(not words, f"after {seconds:.0f} s these are left: {words}\n{self.text()}")
            time.sleep(0.1)

    def failed(self, *words: str, seconds: float = 90) -> str:
        """The line with all of these words, once the command has ended with status 1 and left nothing."""
        self.ends(1, seconds=seconds)
        self.nothing_left()
        return self.line(*words)


@contextmanager
def running_on(where: Place, *words: str, out: Path, host: str = "h1", **environment: str) -> Iterator[OnHosts]:
    """Run a command of hvdkit on a host; nothing of it outlives the context."""
    job = OnHosts(where, words, out, environment, host)
    try:
        yield job
    finally:
        job.end()


def ran_on(where: Place, *words: str, out: Path, host: str = "h1", **environment: str) -> OnHosts:
    """Run a command of hvdkit on a host to its end; other jobs of the place are left alone."""
    job = OnHosts(where, words, out, environment, host)
    job.ended()
    return job


def undisturbed(words: tuple[str, ...] = TRAIN) -> dict[str, str]:
    """The bits of a run that nobody disturbs, by the direct launcher; kept for an hour."""
    kept = Path(tempfile.gettempdir()) / f"hvdkit-trials-{os.getuid()}-{ROOT.stat().st_ino}.json"
    name = " ".join(words)
    with suppress(OSError, ValueError, KeyError):
        if time.time() - kept.stat().st_mtime < 3600:
            return dict(json.loads(kept.read_text())[name])
    with tempfile.TemporaryDirectory() as folder:
        job = ran(*words, out=Path(folder) / "whole")
        expect(job.process.returncode == 0, job.text())
        found = bits(job)
    kept.write_text(json.dumps({name: found}))
    return found


def same_bits(job: Any, words: tuple[str, ...] = TRAIN) -> str:
    """Raises `Unexpected` where the run's weights or lines are not those of a run that nobody disturbed."""
    first, second = undisturbed(words), bits(job)
    other = [name for name in first | second if first.get(name) != second.get(name)]
    expect(not other, f"other bits in {other[:6]}: {[(first.get(n), second.get(n)) for n in other[:2]]}")
    return f"{len(first)} digests and lines are equal"


def resumes(where: Place, out: Path, words: tuple[str, ...] = TRAIN) -> str:
    """--resume on the same hosts, to the end, with the bits of a run that nobody disturbed."""
    with running_on(where, *words, "--resume", out=out) as job:
        job.ends(0)
        job.nothing_left()
        return same_bits(job, words)


@contextmanager
def nobody_watches(folder: Path) -> Iterator[list[bytes]]:
    """Another user reads all command lines meanwhile; they are in the list at the end."""
    seen: list[bytes] = []
    with tempfile.TemporaryDirectory(prefix="hvdkit-nobody-") as open_to_all:
        Path(open_to_all).chmod(0o755)
        stop = Path(open_to_all) / "stop"
        command = ["/usr/bin/python3", "-c", _NOBODY, str(stop)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, user=65534, group=65534, cwd="/") as process:
            try:
                yield seen
            finally:
                stop.touch()
                seen += process.communicate(timeout=30)[0].split(b"\n")


def secrets_found(pids: list[int]) -> dict[str, bytes]:
    """Values of these processes' variables that are secrets of the job, by name."""
    found: dict[str, bytes] = {}
    for pid in pids:
        with suppress(OSError):
            for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                name, _, value = each.partition(b"=")
                if any(mark in name for mark in (b"SECRET", b"KEY", b"TOKEN")) and len(value) >= 8:
                    found[name.decode()] = value
                for part in value.split(b'"secret": "')[1:]:
                    found[f"secret in {name.decode()}"] = part.partition(b'"')[0]
    return found
