"""What is to be started: one command on each of np ranks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from hvdkit.errors import RequestError
from hvdkit.files import closed_to_writes
from hvdkit.heartbeat import STOP
from hvdkit.launch.agent import output
from hvdkit.launch.agent.reports import PROGRAM_RUNS, RANKS, REPORTS_DONE, SHARED
from hvdkit.launch.hosts import Host
from hvdkit.launch.slots import Slot, fill
from hvdkit.rendezvous import SECRET
from hvdkit.runtimes.store import fault_of

Tick = Callable[[], None]  # called ten times a second while ranks run; what it raises ends them

STACKS = "stacks.txt"  # where ranks were that hang
MARK = "shared-"  # begins the name of the file by which a host knows the folder of logs
_OLD = ("rank-*.log", "worker-*", "horovodrun.log", "srun.log", "mpirun.log", "ray.log", "rank-*.failure.json",
        "exits.json", STACKS, STOP, f"{MARK}*")  # fmt: skip
_STARTUP = Path(__file__).with_name("startup")  # has what Python imports first
_AGENT = Path(__file__).with_name("agent") / "rank_agent.py"
# A rank that has to write a checkpoint can do so; the whole end stays below 10 s.
GRACE_S = 3.0
# horovodrun is given a little longer than its ranks: once they are gone it waits 5 s for a shell that it has frozen.
LAUNCHER_GRACE_S = 1.0
# An agent reports a hang after the first share of the timeout; in the second share the other agents report theirs.
HANG_SHARE, SETTLE_SHARE = 0.85, 0.1


@dataclass(frozen=True)
class ElasticBounds:
    """From how many to how many ranks the job may have, and the program that prints host:slots a line at any time.

    Without such a program the hosts are the job's.
    """

    min_np: int
    max_np: int
    discovery: Path | None = None


@dataclass(frozen=True)
class Job:
    """One command on np ranks, and the folder of its logs.

    `python` is the interpreter that has the framework and Horovod, `arguments` what follows it on each rank's command
    line. `environment` is added to the launcher's own. `log_dir` receives rank-<r>.log (standard output and error
    together), rank-<r>.failure.json (from a rank that knows why it failed) and exits.json. All hosts have to see it,
    which their agents check before they start a rank.
    Ranks that are ended have `grace_s` seconds from SIGTERM to SIGKILL. Where the launcher gets SIGTERM, they are first
    asked, by a file in `log_dir`, to end by themselves within `preemption_grace_s` seconds.
    With `reports_done` ranks say when they have done their work (hvdkit.heartbeat), and an exit status of 0 before
    that is a failure.
    With `elastic` the job survives lost ranks, and new ones join; it starts with `np`.
    A `program` is the command line of a rank that knows nothing of hvdkit: it has no heartbeat and leaves no record.
    `secret` is the key of its rendezvous server.
    A rank without progress for `stall_timeout_s` seconds ends the job; with 0 it waits for ever. Where ranks have only
    lost another one, that one has `settle_s` seconds to end by itself, so that its own error is known.
    """

    python: Path
    arguments: list[str]  # or a `program`
    np: int
    hosts: list[Host]
    environment: dict[str, str]
    log_dir: Path
    stall_timeout_s: float = 60.0
    settle_s: float = 10.0
    grace_s: float = GRACE_S
    preemption_grace_s: float = 0.0
    elastic: ElasticBounds | None = None
    secret: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    reports_done: bool = False
    program: list[str] | None = None
    nonce: str = field(default_factory=lambda: secrets.token_hex(8), repr=False)

    @cached_property
    def here(self) -> bool:
        """Whether all of the job's hosts are this machine."""
        return all(host.here for host in self.hosts)

    @property
    def mark(self) -> Path | None:
        """The file by which hosts know the folder of logs; None where all ranks run here, now and later."""
        return None if self.here and self.elastic is None else self.log_dir.absolute() / f"{MARK}{self.nonce}"

    def command(self) -> list[str]:
        """A rank's command line."""
        return [str(self.python), *self.arguments] if self.program is None else self.program

    def slots(self) -> list[Slot]:
        """Where each rank runs, in rank order."""
        return fill(self.hosts, self.np)

    @property
    def stop_file(self) -> Path:
        """The file that asks the ranks to end by themselves (hvdkit.heartbeat looks for it)."""
        return self.log_dir / STOP

    def log(self, rank: int, name: str = "") -> Path:
        """The file that holds what this rank printed; `name` where its files are not named by its rank."""
        return self.log_dir / f"{name or f'rank-{rank}'}.log"

    def base_environment(self) -> dict[str, str]:
        """The environment of every rank under any launcher; a user's HOROVOD_* settings stay in force.

        Horovod names the ranks that do not join a collective before the agents report the others as hanging.
        """
        stalls_s = max(1, int(HANG_SHARE * self.stall_timeout_s / (output.CHECKS + 2)))
        environment = {
            **({output.VARIABLE: str(stalls_s)} if self.stall_timeout_s else {}),
            **os.environ,
            **self.environment,
            "PYTHONUNBUFFERED": "1",
            SECRET: self.secret,
            "HVDKIT_RANK_DIR": str(self.log_dir.absolute()),
            REPORTS_DONE: "1" if self.reports_done else "",
            SHARED: str(self.mark or ""),
            PROGRAM_RUNS: "1" if self.program else "",
        }
        if self.program:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_STARTUP), environment.get("PYTHONPATH")]))
        return environment


@dataclass(frozen=True)
class AgentCommand:
    """A command that an agent starts: the rank that it is (None: a program that starts ranks), its environment.

    A program goes by its `name`.
    """

    rank: int | None
    command: list[str]
    environment: dict[str, str]
    name: str = "horovodrun"  # Horovod's elastic driver too


def agent_command(python: str, role: str, job: Job, command: list[str]) -> list[str]:
    """The command line of an agent in that role (agent/rank_agent.py) that starts `command`.

    Without site packages it starts in 0.05 s.
    """
    grace_s = job.grace_s + (0.0 if role in RANKS else LAUNCHER_GRACE_S)
    settings = [str(job.log_dir.absolute()), str(grace_s), str(HANG_SHARE * job.stall_timeout_s)]
    return [python, "-I", "-S", str(_AGENT), role, *settings, *command]


def prepare(job: Job) -> None:
    """Check the interpreter, make the log folder and remove an older job's files from it.

    Raises RequestError where the interpreter is missing or the folder cannot be written.
    """
    if fault := fault_of(job.python):
        raise RequestError(f"{job.python}: the interpreter {fault}; build it with `hvdkit runtime build`")
    try:
        job.log_dir.mkdir(parents=True, exist_ok=True)
        for pattern in _OLD:
            for old in job.log_dir.glob(pattern):
                old.unlink()
        if job.mark is not None:
            job.mark.touch()
        reason = closed_to_writes(job.log_dir)
    except OSError as error:
        reason = error.strerror
    if reason:
        raise RequestError(f"{job.log_dir}: cannot be written ({reason}); choose another --out")
