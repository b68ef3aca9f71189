"""How ranks ended, and the cause as far as that shows it. Which rank is to blame is decided in blame.py."""

from __future__ import annotations

import json
import signal
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from hvdkit.errors import RunError
from hvdkit.files import write_atomic
from hvdkit.heartbeat import LOST_A_PEER, SAID_BY_HOROVOD
from hvdkit.launch.agent import output
from hvdkit.launch.job import Job

_TAIL_LINES, _TAIL_BYTES = 15, 8192
_CRASH = "Fatal Python error: "  # of faulthandler
_LINE_LIMIT = 400


class RankFailure(RunError):
    """A rank failed and the job was ended. Carries `rank`, `host`, and `exit_code` or `signal` (the other is None).

    `stopped` is whether the launcher has ended that rank.

    `record` is what the rank itself wrote about its failure, if anything.
    """

    def __init__(self, message: str, end: RankEnd) -> None:
        super().__init__(message)
        self.rank, self.host = end.rank, end.host
        self.exit_code, self.signal, self.stopped = end.exit_code, end.signal, end.stopped
        self.record = end.record


class Terminated(RunError):
    """The launcher got SIGTERM or SIGHUP and has ended all ranks."""

    def __init__(self, number: int) -> None:
        super().__init__(f"ended by {signal_name(number)}, and all ranks with it")
        self.exit_status = 128 + number


@dataclass(frozen=True)
class FailureRecord:
    """What a rank wrote about its own failure. `kind` is request, error or communication (a peer was lost)."""

    kind: str
    message: str
    step: int | None

    @classmethod
    def read(cls, record: Any) -> FailureRecord | None:
        """The record in an agent's report; None where there is none, or none that can be read."""
        if not isinstance(record, dict) or record.get("kind") not in ("request", "error", "communication"):
            return None
        step = record.get("step")
        return cls(record["kind"], str(record.get("message")), step if isinstance(step, int) else None)


class Cause(IntEnum):
    """Why a rank ended, in the order of blame: a smaller one is never the consequence of a larger one."""

    OWN = 0  # an exit code or a signal of its own, an error that it wrote down, or it left early
    FROZEN = 1  # SIGSTOP held it when it was asked to stop, so it did not answer
    UNKNOWN = 2  # it was not asked to stop, and nothing is known of its end
    TAKEN = 3  # what started it has asked it to stop, and not the launcher, as where its node leaves the cluster
    PERHAPS_LOST = 4  # it failed, and its output has a broken connection, which may not be Horovod's
    LOST = 5  # it failed because another rank was gone
    STOPPED = 6  # it was asked to stop, by the launcher or by horovodrun
    WELL = 7  # exit code 0


@dataclass(frozen=True)
class RankEnd:
    """The end of one rank. `failed_at` and `seconds` (since its start) are of the launcher's monotonic clock."""

    rank: int
    host: str
    pid: int | None = None  # None where it never started
    exit_code: int | None = None
    signal: str | None = None
    out_of_memory: bool | None = None  # whether the kernel has ended a process meanwhile; None: unknown
    stopped: bool = False  # it was being ended, by the launcher or from outside
    outside: bool = False
    frozen: bool = False  # SIGSTOP held it by then
    after_stop: bool = False  # it failed only after it was asked to stop
    left_early: bool = False  # with exit code 0, before it had said that its work is done
    seconds: float | None = None
    failed_at: float = float("inf")
    reported_at: float = float("-inf")  # to the launcher
    record: FailureRecord | None = None
    tail: str = ""
    log_error: str | None = None
    name: str = ""  # of its files; rank-<r> where it is empty
    address: str | None = None  # of its host's link
    unanswered: Collection[str] = ()  # addresses that did not answer its host any more
    activity: Mapping[str, Any] | None = None  # of the watchdog, when it was asked to end

    @property
    def known(self) -> bool:
        """Whether it is known how the rank ended."""
        return not (self.exit_code is None and self.signal is None and self.record is None)

    @cached_property
    def cause(self) -> Cause:
        """Why it ended, as far as its own record and output show."""
        if self.record is not None and not self.after_stop:
            return Cause.LOST if self.record.kind == "communication" else Cause.OWN
        if self.outside and (self.exit_code != 0 or self.left_early):
            return Cause.TAKEN
        if self.stopped:
            return Cause.FROZEN if self.frozen else Cause.STOPPED
        if self.exit_code == 0:
            return Cause.OWN if self.left_early else Cause.WELL
        if not self.known:
            return Cause.UNKNOWN
        # SIGKILL is sent by others. Any other signal may be how a framework ends after the error in its output.
        lost = [] if self.signal == "SIGKILL" else [line for line in self.tail.splitlines() if LOST_A_PEER.search(line)]
        if not lost:
            return Cause.OWN
        return Cause.LOST if any(SAID_BY_HOROVOD.search(line) for line in lost) else Cause.PERHAPS_LOST

    @property
    def failed(self) -> bool:
        """Whether the rank failed, and not because it was asked to stop."""
        return self.cause in (Cause.OWN, Cause.UNKNOWN, Cause.TAKEN) or self.secondary

    @property
    def secondary(self) -> bool:
        """Whether it failed only because another rank was gone."""
        return self.cause in (Cause.LOST, Cause.PERHAPS_LOST)


def rank_failure(job: Job, what: str, end: RankEnd) -> RankFailure:
    """The error that says what happened, and that all ranks were ended; with the end of that rank's log."""
    path = job.log(end.rank, end.name)
    log = f"its log, {path}" + ("" if path.exists() else f" on {end.host}")
    log += "" if end.log_error is None else f" (cut short: {end.log_error})"
    return RankFailure(f"{what}; all ranks were ended; {shown_tail(log, end.tail or _last_of(path))}", end)


def _last_of(log: Path) -> str:
    """The end of a log in the shared folder, where the agent's own word of it was lost, as with horovodrun's ssh."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL_BYTES))
        return file.read(_TAIL_BYTES).decode("utf-8", "replace")
    return ""


def signal_name(number: int | None) -> str | None:
    """SIGKILL for 9; real-time signals by number."""
    try:
        return None if number is None else signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def shown_tail(log: str, tail: str) -> str:
    """`log` ends: and the last lines; of a line that was overwritten (a progress bar), what was last seen.

    At most 15 lines of 400 characters. A crash is shown from its beginning, as Python prints the innermost call first.
    """
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in output.without(tail).rstrip().split("\n")]
    crash = next((index for index, line in enumerate(lines) if line.startswith(_CRASH)), len(lines) - _TAIL_LINES)
    lines = lines[max(0, crash) :][:_TAIL_LINES]
    if not any(lines):
        return f"{log}, {'has only warnings of this wait' if tail.strip() else 'is empty'}"
    return f"{log}, ends:\n" + "\n".join("    " + line[:_LINE_LIMIT] for line in lines)


def write_exits(path: Path, ends: Iterable[RankEnd]) -> None:
    """exits.json: how each rank ended, in rank order. Raises RunError where it cannot be written."""
    keys = ("rank", "host", "pid", "exit_code", "signal", "stopped", "seconds", "log_error")
    rows = [{key: getattr(end, key) for key in keys} for end in ends]
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have removed it meanwhile
    write_atomic(path, json.dumps(rows, indent=2) + "\n")
