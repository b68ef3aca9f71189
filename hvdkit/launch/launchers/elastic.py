"""Ranks that come and go: Horovod's elastic driver decides who takes part, training goes on with whom there is.

A rank that is killed, frozen or lost with its host is survived. One that fails by itself, as it says in its record,
would fail again: it ends the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from hvdkit.core.heartbeat import STARTING, WAITING
from hvdkit.errors import RunError
from hvdkit.launch.agents import STALL_SETTLE_SHARE, Crew, Guarded
from hvdkit.launch.diagnosis import blame, exits
from hvdkit.launch.diagnosis.hangs import Stall
from hvdkit.launch.hosts import is_this_machine
from hvdkit.launch.job import GRACE_S, Job, Tick
from hvdkit.launch.supervise import by_signal, conclude

# A driver is given a little longer than its ranks.
DRIVER_GRACE_S = GRACE_S + 1.0
REMOVED = "has been removed from elastic job"  # Horovod's last word in a rank that it no longer wants; it aborts then


def supervise(job: Job, driver: Guarded, on_tick: Tick | None, begins_anew: bool = False) -> None:
    """Run the driver and its workers to their end, calling `on_tick` every 0.1 s; writes exits.json.

    `begins_anew` says that the driver starts all workers again where all are lost.

    Raises RankFailure or RequestError where a rank fails by its own fault, RunError where too few ranks are left or the
    driver fails; on signals as `supervise.supervise` does.
    """
    workers = _Workers(job, begins_anew)
    caught = workers.follow([driver], on_tick)
    conclude(job, workers.all_ends(), _fault(job, workers, caught))


def _fault(job: Job, workers: _Workers, caught: list[int]) -> BaseException | None:
    end = workers.horovodrun_end
    well = end is not None and end["exit_code"] == 0
    if caught:
        return None if workers.left_in_order and well else by_signal(caught)
    fatal = blame.judge(end for end in workers.ended if end.failed and end.record is not None and not end.secondary)
    if fatal is not None:
        return blame.failure(job, fatal)
    if workers.hung is not None:
        return RunError(workers.hung)
    if well:
        return None
    if end is None:
        return RunError("the guard of Horovod's elastic driver was killed, and all ranks with it; go on with --resume")
    if end["signal"]:
        how = exits.signal_name(end["signal"])
        return RunError(f"Horovod's elastic driver was killed by {how}, and all ranks with it; go on with --resume")
    lost = blame.judge(workers.ended)
    why = f"the first lost: {blame.failure(job, lost)}" if lost else exits.shown_tail("its output", end["tail"])
    assert job.elastic is not None
    return RunError(
        f"Horovod's elastic driver gave up: {len(workers.ends)} rank(s) were lost, expected at least "
        f"{job.elastic.min_np} (elastic.min_np) to go on; {why}"
    )


class _Workers(Crew):
    """The driver's guard and the guards of its workers, and what they have told."""

    def __init__(self, job: Job, begins_anew: bool) -> None:
        super().__init__(job)
        self._begins_anew = begins_anew
        self._places: dict[str, tuple[int, str]] = {}  # rank at the start, and host
        self._pids: dict[str, int] = {}
        self._stalls: dict[str, Stall] = {}
        self._stalled_at = 0.0
        self.ends: dict[str, exits.RankEnd] = {}  # the last of each name
        self.ended: list[exits.RankEnd] = []  # all, but for those that Horovod no longer wanted
        self.fatal = False
        self.hung: str | None = None

    def all_ends(self) -> list[exits.RankEnd]:
        """How each worker ended, in the order of their starts; little of one whose guard fell silent."""
        return [
            self.ends.get(name) or exits.RankEnd(rank, host, self._pids[name], name=name)
            for name, (rank, host) in self._places.items()
        ]

    @property
    def must_stop(self) -> bool:
        return self._stopped_at is None and (self.overdue or self.fatal or self.hung is not None)

    @property
    def all_gone(self) -> bool:
        return len(self.ends) == len(self._pids)

    @property
    def left_in_order(self) -> bool:
        """Whether the workers have ended by themselves after they were asked to."""
        return self._asked_at is not None and self._stopped_at is None

    def note(self, report: dict[str, Any], received: float) -> None:
        name, host = report["name"], report["host"] or "?"
        if report["event"] == "started":
            if len(self._pids) >= self._job.np:
                self._tell(f"{name} joins" if name not in self._pids else f"{name} is started again")
            self._pids[name] = report["pid"]
            self._places[name] = report["rank"], host
            self.ends.pop(name, None)
        elif report["event"] == "stalled":
            if report["phase"] != WAITING:
                self._stalls[name] = Stall.read(report, host)
                self._stalled_at = self._stalled_at or received
        elif report["event"] == "resumed":
            self._stalls.pop(name, None)
            self._stalled_at = self._stalled_at if self._stalls else 0.0
        elif report["event"] == "cut off":
            self._tell(f"{name}: its host's interface {report['interface']} is down")
        elif name not in self.ends:  # what a guard tells counts more than that it was killed afterwards
            end = self.ends[name] = self.read_end(report, host, self._pids.get(name), received)
            self._stalls.pop(name, None)
            removed = end.record is None and REMOVED in end.tail
            if not removed:
                self.ended.append(end)
            if end.failed and self._stopped_at is None:
                if end.record is not None and not end.secondary:
                    self.fatal = True
                elif removed:
                    self._tell(f"{name} leaves: its host is not there any more")
                else:
                    how = f"was killed by {end.signal}" if end.signal else f"ended with exit code {end.exit_code}"
                    met = not self._begins_anew or self._have_met()
                    then = "training goes on with the others" if met else "none is training, so all begin anew"
                    self._tell(f"{name} {how} after {end.seconds:.1f} s; {then}")
                    if not met:
                        self._kill(*self._pids.keys() - self.ends.keys())

    def enforce(self) -> None:
        super().enforce()
        if self._stalls and time.monotonic() > self._stalled_at + STALL_SETTLE_SHARE * self._job.stall_timeout_s:
            name = min(self._stalls, key=lambda name: self._stalls[name].order)
            hangs = self._stalls[name]
            told = f"{name} hangs: no progress for {hangs.seconds:.0f} s, {hangs.doing}"
            self._stalls, self._stalled_at = {}, 0.0
            if self._job.here or is_this_machine(hangs.host):
                self._tell(f"{told}; it is ended")
                self._kill(name)
            else:
                self.hung = f"{told}; it is on another host, so all ranks were ended; go on with --resume"

    def _have_met(self) -> bool:
        """Whether any worker that is left has got through Horovod's start: else all wait for the lost one, for long."""
        left = self._pids.keys() - self.ends.keys()
        return not left or any(phase_of(self._job.log_dir / f"{name}.beat") != STARTING for name in left)

    def _kill(self, *names: str) -> None:
        for name in names:
            with contextlib.suppress(OSError):
                os.kill(self._pids[name], signal.SIGKILL)

    @staticmethod
    def _tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def phase_of(beat: Path) -> str:
    """What a rank says in its file that it is doing; that it is starting where it has not said anything."""
    try:
        return beat.read_text().split(" ", 2)[2].strip()
    except (OSError, IndexError):
        return STARTING


def settings(job: Job, places: list[str]) -> str:
    """What `elastic_driver.py` takes as its first argument."""
    assert job.elastic is not None
    script = job.elastic.discovery
    return json.dumps(
        {
            "np": job.np,
            "min_np": job.elastic.min_np,
            "max_np": job.elastic.max_np,
            "places": places,
            "script": str(script.absolute()) if script else None,
        }
    )
