"""Start guards, follow them to their end, end all when one rank fails."""

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdkit.errors import RunError
from hvdkit.launch import ends
from hvdkit.launch.guard import MARK
from hvdkit.launch.job import GRACE_S, Job
from hvdkit.launch.stalls import Stall, stall_failure

Tick = Callable[[], None]

_GUARD = Path(__file__).with_name("guard.py")
_TICK_S = 0.1
# A rank that only lost its peer is followed within moments by the one that really failed; that one may have its say.
_SETTLE_S = 1.0
# A guard needs this much longer than the grace it gives (guard.AFTERMATH_S and the walk through /proc).
_MARGIN_S = 2.0
# A guard tells of a stall after this share of the timeout; in the next, the other guards tell of theirs.
_STALL_SHARE, _STALL_SETTLE_SHARE = 0.85, 0.1


@dataclass(frozen=True)
class Guarded:
    """A command to be started under a guard: its role (guard.py), its rank (None: horovodrun), environment."""

    role: str
    rank: int | None
    command: list[str]
    environment: dict[str, str]
    grace_s: float = GRACE_S


def guard_command(python: str, role: str, job: Job, grace_s: float, command: list[str]) -> list[str]:
    """The command line that starts `command` under a guard. It starts in 0.05 s: no site packages are looked at."""
    settings = [str(job.log_dir.absolute()), str(grace_s), str(_STALL_SHARE * job.stall_timeout_s)]
    return [python, "-I", "-S", str(_GUARD), role, *settings, *command]


def supervise(job: Job, commands: list[Guarded], on_tick: Tick | None) -> None:
    """Run the commands to their end, calling `on_tick` every 0.1 s from this thread; writes exits.json.

    Raises RankFailure where a rank fails or hangs (RequestError where it found the request wrong), after ending the
    others: within GRACE_S + 2 s. SIGINT and SIGTERM end all ranks likewise, then KeyboardInterrupt or Terminated is
    raised. RunError where no process can be started, horovodrun fails or exits.json cannot be written. What `on_tick`
    raises ends all ranks too.
    """
    crew = _Crew(job)
    with _caught_signals() as caught:
        try:
            for guarded in commands:
                crew.start(guarded)
            answered = 0
            while crew.running:
                crew.listen(_TICK_S)
                signalled = len(caught) > answered
                if signalled and crew.may_leave(caught):
                    crew.ask_to_leave()
                elif signalled or crew.must_stop:
                    crew.stop(again=signalled)
                answered = len(caught)
                crew.enforce()
                if on_tick is not None:
                    on_tick()
        finally:
            # Whatever happened, an exception of on_tick too, no process is left.
            crew.end()
    _conclude(job, crew, caught)


def _conclude(job: Job, crew: _Crew, caught: list[int]) -> None:
    """Write exits.json; raise what is to be raised."""
    final = crew.all_ends()
    fault = _fault(job, crew, final, caught)
    try:
        ends.write_exits(job.log_dir / "exits.json", final)
    except RunError:
        # What ended the run matters more than that its end could not be written down.
        if fault is None:
            raise
    if fault is not None:
        raise fault


def _fault(job: Job, crew: _Crew, final: list[ends.RankEnd], caught: list[int]) -> BaseException | None:
    """What the caller has to hear; None where all is well."""
    if caught and crew.left_in_order:
        return None
    if signal.SIGINT in caught:
        return KeyboardInterrupt()
    if caught:
        return ends.Terminated("ended by SIGTERM, and all ranks with it")
    to_blame = ends.culprit(final)
    if crew.stalls and (to_blame is None or to_blame.secondary):
        return stall_failure(job, crew.stalls, final)
    horovodrun = crew.horovodrun_end
    if horovodrun is not None and horovodrun["exit_code"] != 0 and (to_blame is None or not to_blame.known):
        return _horovodrun_failure(job, horovodrun, [end for end in final if not end.known])
    return None if to_blame is None else ends.failure(job, to_blame)


def _horovodrun_failure(job: Job, end: dict[str, Any], unknown: list[ends.RankEnd]) -> RunError:
    """horovodrun failed by itself, or lost its connection to a rank."""
    code, number = end["exit_code"], end["signal"]
    how = f"ended with exit code {code}" if number is None else f"was killed by {ends.signal_name(number)}"
    ranks = ", ".join(f"rank {lost.rank} on {lost.host}" for lost in unknown)
    of_ranks = f"; nothing is known of the end of {ranks}" if unknown else ""
    log = ends.shown_tail(f"its output, {job.log_dir / 'horovodrun.log'}", end["tail"])
    return RunError(f"horovodrun {how}{of_ranks}; where other hosts are named, check `ssh HOST true` for each; {log}")


class _Crew:
    """All guards of one job, and what they have told."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._hosts = {slot.rank: slot.hostname for slot in job.slots()}
        self._selector = selectors.DefaultSelector()
        self._guards: list[subprocess.Popen[bytes]] = []
        self._buffers: dict[int, bytes] = {}
        self._pids: dict[int, int] = {}
        self._clock_offset: dict[int | None, float] = {}
        self._ends: dict[int, ends.RankEnd] = {}
        self._stopped_at: float | None = None
        self._asked_at: float | None = None
        self._stalled_at: float | None = None
        self.stalls: list[Stall] = []
        self._hurried = False
        self._patience_s = 0.0
        self.horovodrun_end: dict[str, Any] | None = None  # where it is used

    def start(self, guarded: Guarded) -> None:
        """Start one command under its guard."""
        command = guard_command(sys.executable, guarded.role, self._job, guarded.grace_s, guarded.command)
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
    def must_stop(self) -> bool:
        """Whether a rank's failure is reason to end the others now."""
        if self._stopped_at is not None:
            return False
        if self._asked_at is not None and time.monotonic() > self._asked_at + self._job.farewell_s:
            return True
        if self._stalled_at is not None:
            settled = self._stalled_at + _STALL_SETTLE_SHARE * self._job.stall_timeout_s
            if len(self.stalls) + len(self._ends) == len(self._hosts) or time.monotonic() > settled:
                return True
        failed = [end for end in self._ends.values() if end.failed]
        if not failed:
            return False
        if all(end.secondary for end in failed):
            return time.monotonic() > min(end.failed_at for end in failed) + _SETTLE_S
        return True

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
                self._note(line.decode("utf-8", "replace"), received)
            if not data:
                self._selector.unregister(key.fileobj)
                self._note_silence(*key.data)

    def _note(self, line: str, received: float) -> None:
        """One line of a guard's output."""
        _, mark, text = line.partition(MARK)
        if not mark:
            return
        try:
            report = json.loads(text)
            rank, event, clock = report["rank"], report["event"], float(report["clock"])
        except (ValueError, KeyError, TypeError):
            return
        if event == "started":
            # A guard of this machine shares our monotonic clock; another machine's, counted since its own boot, is far
            # off. Wall clocks, which may differ between hosts and be set at any time, take no part.
            same_clock = abs(received - clock) < 5.0
            self._clock_offset[rank] = 0.0 if same_clock else received - clock
            if rank is not None:
                self._pids[rank] = report["pid"]
        elif event == "stalled":
            self.stalls.append(Stall.read(report, self._hosts[rank]))
            self._stalled_at = self._stalled_at or received
        elif rank is None:
            self.horovodrun_end = report
        else:
            self._ends[rank] = ends.RankEnd(
                rank=rank,
                host=self._hosts[rank],
                pid=self._pids.get(rank),
                exit_code=report["exit_code"],
                signal=ends.signal_name(report["signal"]),
                stopped=report["stopped"],
                frozen=report["frozen"],
                seconds=round(report["seconds"], 3),
                failed_at=report["failed_at"] + self._clock_offset.get(rank, 0.0),
                record=ends.Record.read(report["failure"]),
                tail=report["tail"],
                log_error=report["log_error"],
            )

    def _note_silence(self, guard: subprocess.Popen[bytes], rank: int | None) -> None:
        """A guard is gone. One that did not tell of its rank's end was killed itself, and the rank with it."""
        if rank is None or rank in self._ends:
            return
        code = guard.wait()
        self._ends[rank] = ends.RankEnd(
            rank=rank,
            host=self._hosts[rank],
            pid=self._pids.get(rank),
            signal=ends.signal_name(-code) if code < 0 else None,
            stopped=self._stopped_at is not None,
            failed_at=time.monotonic(),
        )

    def may_leave(self, caught: list[int]) -> bool:
        """Whether ranks may end in good order: on the first signal, if it is SIGTERM and the job allows it."""
        return self._job.farewell_s > 0 and caught == [signal.SIGTERM] and self._stopped_at is None

    def ask_to_leave(self) -> None:
        """Ask the ranks to end by themselves."""
        self._asked_at = time.monotonic()
        try:
            self._job.stop_file.touch()
        except OSError:  # a full disk, which allows no checkpoint either
            self.stop()

    @property
    def left_in_order(self) -> bool:
        """Whether all ranks have ended by themselves and well after they were asked to."""
        return (
            self._asked_at is not None
            and self._stopped_at is None
            and not any(end.failed for end in self._ends.values())
            and len(self._ends) == len(self._hosts)
        )

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
        if self.horovodrun_end is None and len(self._ends) == len(self._hosts) and not self._hurried:
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

    def all_ends(self) -> list[ends.RankEnd]:
        """How each rank ended, in rank order; of a rank whose guard fell silent, what can be known."""
        stopped = self._stopped_at is not None
        return [
            self._ends.get(rank) or ends.RankEnd(rank, host, self._pids.get(rank), stopped=stopped)
            for rank, host in self._hosts.items()
        ]

    def _signal_guards(self, number: int) -> None:
        for process in self._guards:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


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
