"""How ranks ended, which one is to blame, and how to say so."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.core.lifeline import LOST_A_PEER
from hvdkit.errors import HvdkitError, RequestError, RunError
from hvdkit.files import write_atomic
from hvdkit.launch.job import Job

_TAIL_LINES = 15
_CRASH = "Fatal Python error: "  # of faulthandler
_LINE_LIMIT = 400


class RankFailure(RunError):
    """A rank failed and the job was ended. Carries `rank`, `host`, and `exit_code` or `signal` (the other is None).

    `record` is what the rank itself left about its failure, if anything.
    """

    def __init__(self, message: str, end: RankEnd) -> None:
        super().__init__(message)
        self.rank = end.rank
        self.host = end.host
        self.exit_code = end.exit_code
        self.signal = end.signal
        self.record = end.record


class Terminated(RunError):
    """The launcher got SIGTERM and has ended all ranks."""

    exit_status = 128 + signal.SIGTERM


@dataclass(frozen=True)
class Record:
    """What a rank wrote about its own failure. `kind` is request, error or communication (a peer was lost)."""

    kind: str
    message: str
    step: int | None

    @classmethod
    def read(cls, record: Any) -> Record | None:
        """The record in a guard's report; None where there is none or no sense in it."""
        if not isinstance(record, dict) or record.get("kind") not in ("request", "error", "communication"):
            return None
        step = record.get("step")
        return cls(record["kind"], str(record.get("message")), step if isinstance(step, int) else None)


@dataclass(frozen=True)
class RankEnd:
    """The end of one rank. `failed_at` and `seconds` (since its start) are of the launcher's monotonic clock.

    `stopped` says that it was being ended by the launcher, `frozen` that SIGSTOP held it by then;
    `pid` and `seconds` are None where it never started.
    """

    rank: int
    host: str
    pid: int | None = None
    exit_code: int | None = None
    signal: str | None = None
    stopped: bool = False
    frozen: bool = False
    seconds: float | None = None
    failed_at: float = float("inf")
    record: Record | None = None
    tail: str = ""
    log_error: str | None = None
    name: str = ""  # of its traces; rank-<r> where nothing else is said
    address: str | None = None  # of its host's link
    unanswered: tuple[str, ...] = ()  # addresses that did not answer its host any more

    @property
    def known(self) -> bool:
        """Whether anything tells how the rank ended."""
        return not (self.exit_code is None and self.signal is None and self.record is None)

    @property
    def failed(self) -> bool:
        """Whether the rank ended otherwise than well and by its own doing."""
        if self.record is not None:
            return True
        return self.exit_code != 0 and not (self.stopped and self.signal in (None, "SIGTERM", "SIGKILL"))

    @property
    def secondary(self) -> bool:
        """Whether it failed only because another rank was gone."""
        if self.record is not None:
            return self.record.kind == "communication"
        return self.signal is None and bool(LOST_A_PEER.search(self.tail))


def signal_name(number: int | None) -> str | None:
    """SIGKILL for 9; real-time signals by number."""
    try:
        return None if number is None else signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def culprit(ends: Iterable[RankEnd]) -> RankEnd | None:
    """The rank that failed first, and not merely because it lost a peer; None where none failed.

    Peers of a dead rank fail within milliseconds, and may end earlier than a rank that still tidies up after its
    exception: so its own record's time counts, and a lost peer is to blame only where nobody else is.
    """
    every = list(ends)
    failed = [end for end in every if end.failed]
    if failed and all(end.secondary for end in failed):
        # Its peers gave up on a rank that did not answer.
        failed = [end for end in every if end.frozen] or failed
    return min(failed, key=lambda end: (end.secondary, end.failed_at, end.rank), default=None)


def failure(job: Job, end: RankEnd) -> HvdkitError:
    """The error that tells the user of this rank's end: RequestError where the rank itself found the request wrong,
    else RankFailure."""
    if end.record is not None and end.record.kind == "request":
        return RequestError(end.record.message)
    where = f"rank {end.rank} on {end.host}"
    after = "" if end.seconds is None else f" after {end.seconds:.1f} s"
    if end.frozen:
        how = "did not answer: it was frozen by a signal (SIGSTOP, or a debugger)"
    elif end.signal is not None:
        how = f"was killed by {end.signal}{after}"
        if end.signal == "SIGKILL":
            how += " (often the kernel's out-of-memory killer: see `dmesg`, or use a smaller batch)"
    elif end.exit_code is not None:
        how = f"ended with exit code {end.exit_code}{after}"
    else:
        how = f"vanished{after}: nothing is known of its end"
    if end.record is not None:
        step = "" if end.record.step is None else f" at step {end.record.step}"
        how = f"failed{step}: {end.record.message.strip().partition(chr(10))[0]} ({how})"
    path = job.log(end.rank, end.name)
    log = f"its log, {path}" if path.exists() else f"its log, {path} on {end.host}"
    if end.log_error is not None:
        log += f" (cut short: {end.log_error})"
    return RankFailure(f"{where} {how}; all ranks were ended; {shown_tail(log, end.tail)}", end)


def shown_tail(log: str, tail: str) -> str:
    """`log` ends: and the last lines; of a line that was overwritten (a progress bar), what was last seen.

    At most 15 lines of 400 characters. A crash is shown from its beginning, as Python tells the innermost call first.
    """
    lines = [line.rstrip("\r").rpartition("\r")[2].rstrip() for line in tail.rstrip().split("\n")]
    crash = next((place for place, line in enumerate(lines) if line.startswith(_CRASH)), len(lines) - _TAIL_LINES)
    lines = lines[max(0, crash) :][:_TAIL_LINES]
    if not any(lines):
        return f"{log}, is empty"
    return f"{log}, ends:\n" + "\n".join("    " + line[:_LINE_LIMIT] for line in lines)


def write_exits(path: Path, ends: Iterable[RankEnd]) -> None:
    """exits.json: how each rank ended, in rank order. Raises RunError where it cannot be written."""
    keys = ("rank", "host", "pid", "exit_code", "signal", "stopped", "seconds", "log_error")
    rows = [{key: getattr(end, key) for key in keys} for end in ends]
    write_atomic(path, json.dumps(rows, indent=2) + "\n")
