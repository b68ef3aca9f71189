"""Guards as processes: start them, hear what they report, end them."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import RunError
from hvdkit.launch.agent.reports import MARK, boot_id
from hvdkit.launch.diagnosis import exits
from hvdkit.launch.job import GRACE_S, Job, Tick

_GUARD = Path(__file__).with_name("agent") / "rank_agent.py"
_TICK_S = 0.1
# A guard may take this much longer than the grace it gives (guard.AFTERMATH_S and the walk through /proc, on a busy
# machine too) before it is killed.
_MARGIN_S = 5.0
# A guard tells of a stall after this share of the timeout; in the next, the other guards tell of theirs.
STALL_SHARE, STALL_SETTLE_SHARE = 0.85, 0.1


@dataclass(frozen=True)
class Guarded:
    """A command to be started under a guard: its role (agent/rank_agent.py), its rank (None: horovodrun), environment.

    `enter` are words before the guard's own: a command that becomes it somewhere else, such as nsenter.
    """

    role: str
    rank: int | None
    command: list[str]
    environment: dict[str, str]
    grace_s: float = GRACE_S
    enter: tuple[str, ...] = ()


def guard_command(python: str, role: str, job: Job, grace_s: float, command: list[str]) -> list[str]:
    """The command line that starts `command` under a guard. It starts in 0.05 s: no site packages are looked at."""
    settings = [str(job.log_dir.absolute()), str(grace_s), str(STALL_SHARE * job.stall_timeout_s)]
    return [python, "-I", "-S", str(_GUARD), role, *settings, *command]


class Crew:
    """All guards of one job. What they report goes to `note`, which the kinds of job define."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._selector = selectors.DefaultSelector()
        self._guards: list[subprocess.Popen[bytes]] = []
        self._buffers: dict[int, bytes] = {}
        self._clocks = Clocks()
        self._to_clean: set[str] = set()  # by name, whose guards have not said that nothing is left
        self._stopped_at: float | None = None
        self._asked_at: float | None = None
        self._hurried = False
        self._patience_s = 0.0
        self.horovodrun_end: dict[str, Any] | None = None  # where it, or another launcher, is used

    def follow(self, commands: list[Guarded], on_tick: Tick | None) -> list[int]:
        """Run the commands to their end, calling `on_tick` every 0.1 s from this thread; returns signals that came.

        SIGINT and SIGTERM end all ranks. RunError where no process can be started. What `on_tick` raises ends all ranks
        too.
        """
        with _caught_signals() as caught:
            try:
                for guarded in commands:
                    self.start(guarded)
                answered = 0
                while self.running:
                    self.listen(_TICK_S)
                    signalled = len(caught) > answered
                    if signalled and self.may_leave(caught):
                        self.ask_to_leave()
                    elif signalled or self.must_stop:
                        self.stop(again=signalled)
                    answered = len(caught)
                    self.enforce()
                    if on_tick is not None:
                        on_tick()
            finally:
                # Whatever happened, an exception of on_tick too, no process is left.
                self.end()
        return caught

    def start(self, guarded: Guarded) -> None:
        """Start one command under its guard."""
        guard = guard_command(sys.executable, guarded.role, self._job, guarded.grace_s, guarded.command)
        command = [*guarded.enter, *guard]
        try:
            process = subprocess.Popen(
                command,
                env=guarded.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise RunError(f"{command[0]}: no process can be started ({error.strerror}); see `ulimit -u`") from error
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._guards.append(process)
        self._buffers[process.stdout.fileno()] = b""
        self._selector.register(process.stdout, selectors.EVENT_READ, (process, guarded.rank))
        self._patience_s = max(self._patience_s, guarded.grace_s + _MARGIN_S)

    @property
    def running(self) -> bool:
        """Whether a guard still has something to say."""
        return bool(self._selector.get_map())

    @property
    def overdue(self) -> bool:
        """Whether ranks that were asked to leave have not done so in time."""
        return self._asked_at is not None and time.monotonic() > self._asked_at + self._job.preemption_grace_s

    @property
    def must_stop(self) -> bool:
        """Whether there is reason to end all ranks now."""
        return self._stopped_at is None and self.overdue

    @property
    def all_gone(self) -> bool:
        """Whether every rank is known to have ended."""
        return False

    def note(self, report: dict[str, Any], received: float) -> None:
        """One report of a rank's guard."""
        raise NotImplementedError

    def note_silence(self, guard: subprocess.Popen[bytes], rank: int | None) -> None:
        """A guard is gone."""

    def listen(self, timeout_s: float) -> None:
        """Take in what guards report, for at most this long."""
        for key, _ in self._selector.select(timeout_s):
            received = time.monotonic()
            try:
                data = os.read(key.fd, 65536)
            except BlockingIOError:
                continue
            *lines, self._buffers[key.fd] = (self._buffers[key.fd] + data).split(b"\n")
            for line in lines:
                self._hear(line.decode("utf-8", "replace"), received)
            if not data:
                self._selector.unregister(key.fileobj)
                self.note_silence(*key.data)

    def _hear(self, line: str, received: float) -> None:
        """One line of a guard's output."""
        _, mark, text = line.partition(MARK)
        if not mark:
            return
        try:
            report = json.loads(text)
            name, event, clock = report["name"], report["event"], float(report["clock"])
        except (ValueError, KeyError, TypeError):
            return
        self._clocks.note(name, clock, report.get("boot"), received)
        if report["rank"] is None:
            if event == "ended":
                self.horovodrun_end = report
        elif event == "left":
            self._to_clean.discard(name)
        else:
            if event == "started":
                self._to_clean.add(name)
            self.note(report, received)

    def read_end(self, report: dict[str, Any], host: str, pid: int | None, received: float) -> exits.RankEnd:
        """How a rank ended, from its guard's report; little of a rank whose guard was killed."""
        seconds = report.get("seconds")
        return exits.RankEnd(
            rank=report["rank"],
            host=host,
            pid=pid,
            exit_code=report["exit_code"],
            signal=exits.signal_name(report["signal"]),
            stopped=report["stopped"],
            frozen=report.get("frozen", False),
            after_stop=report.get("after_stop", False),
            seconds=None if seconds is None else round(seconds, 3),
            failed_at=self._clocks.here(report["name"], report["failed_at"]),
            heard_at=received,
            record=exits.Record.read(report.get("failure")),
            tail=report.get("tail", ""),
            log_error=report.get("log_error"),
            name=report["name"],
            address=report.get("address"),
            unanswered=tuple(report.get("unanswered", ())),
        )

    def may_leave(self, caught: list[int]) -> bool:
        """Whether ranks may end in good order: on the first signal, if it is SIGTERM and the job allows it."""
        return self._job.preemption_grace_s > 0 and caught == [signal.SIGTERM] and self._stopped_at is None

    def ask_to_leave(self) -> None:
        """Ask the ranks to end by themselves."""
        self._asked_at = time.monotonic()
        try:
            self._job.stop_file.touch()
        except OSError:  # a full disk, which allows no checkpoint either
            self.stop()

    def stop(self, again: bool = False) -> None:
        """Ask every guard to end its command. Asked `again` (a second Ctrl-C), it gives no further grace."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        elif not again:
            return
        self._signal_guards(signal.SIGTERM)

    def enforce(self) -> None:
        """Once ended, wait for nobody: hurry horovodrun when its ranks are gone, kill guards that overstay."""
        if self._stopped_at is None:
            return
        if self.horovodrun_end is None and self.all_gone and not self._to_clean and not self._hurried:
            self._hurried = True
            self._signal_guards(signal.SIGTERM)
        if time.monotonic() > self._stopped_at + self._patience_s:
            self._signal_guards(signal.SIGKILL)  # their commands die with them (PR_SET_PDEATHSIG)

    def end(self) -> None:
        """Leave no guard, and so no rank; returns within the grace and a little more."""
        if self.running:
            self.stop()
        while self.running:
            self.listen(_TICK_S)
            self.enforce()
        for process in self._guards:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._selector.close()
        for trace in [*self._job.log_dir.glob("*.beat"), *self._job.log_dir.glob("*.stack")]:
            trace.unlink(missing_ok=True)  # of a guard that was killed

    def _signal_guards(self, number: int) -> None:
        for process in self._guards:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


class Clocks:
    """What other machines' monotonic clocks, which count from their boot, are ahead or behind of this one's.

    Wall clocks, which may differ between hosts and be set at any time, take no part.
    """

    def __init__(self) -> None:
        self._boot = boot_id()
        self._behind: dict[str, float] = {}

    def note(self, name: str, clock: float, boot: str | None, received: float) -> None:
        """A report of the guard `name`, sent at its `clock`. The one that took least time on its way tells most."""
        if boot is not None and boot == self._boot and clock <= received:
            self._behind[name] = 0.0  # the same clock
        else:
            self._behind[name] = min(received - clock, self._behind.get(name, float("inf")))

    def here(self, name: str, clock: float) -> float:
        """A time of that guard's clock as one of this machine's."""
        return clock + self._behind.get(name, 0.0)


@contextlib.contextmanager
def _caught_signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM are collected in the list that this yields, and answered at the next tick."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may set handlers; there, signals stay its own affair
        return
    before = {
        number: signal.signal(number, lambda received, _: caught.append(received))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield caught
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
