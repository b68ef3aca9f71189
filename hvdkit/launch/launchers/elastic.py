"""Elastic runs: Horovod's elastic driver decides which ranks take part, and training goes on with those.

A run survives a rank that is killed, frozen or lost with its host. A rank whose own record says that it failed by
itself would fail again: it ends the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdkit.core.heartbeat import STARTING
from hvdkit.errors import RunError
from hvdkit.launch.agent_command import AgentCommand
from hvdkit.launch.agents import Agents
from hvdkit.launch.diagnosis import blame, exits
from hvdkit.launch.diagnosis.stalls import open_collectives
from hvdkit.launch.hosts import is_this_machine
from hvdkit.launch.job import Job, Tick
from hvdkit.launch.listener import Listener

_DRIVER = Path(__file__).with_name("elastic_driver.py")
REMOVED = "has been removed from elastic job"  # what Horovod prints in a rank that it excludes, before it aborts


def driver(job: Job, command: list[str], environment: dict[str, str], name: str = "", **where: object) -> AgentCommand:
    """Horovod's elastic driver under the runtime's interpreter, for an elastic job.

    `where` says where it starts workers, and so what `command` is (elastic_driver.py). It goes by `name` in logs.
    """
    assert job.elastic is not None
    settings = {"np": job.np, "places": [], "cluster": False, **asdict(job.elastic), **where}
    line = [str(job.python), str(_DRIVER), json.dumps(settings, default=str), *command]
    return AgentCommand(None, line, environment, name=name or AgentCommand.name)


def supervise(
    job: Job, driver: AgentCommand, on_tick: Tick | None, restarts: bool = False, listener: Listener | None = None
) -> None:
    """Run the driver and its workers to their end, calling `on_tick` every 0.1 s; writes exits.json.

    `restarts` says that the driver starts all workers again where all are lost. Workers that a cluster's program starts
    connect to `listener`.

    Raises RankFailure or RequestError where a rank fails by its own fault, RunError where too few ranks are left or the
    driver fails, and as `Agents.run` does.
    """
    _Workers(job, restarts, listener).run([driver], on_tick)


class _Workers(Agents):
    """The agents of the driver and of its workers."""

    _ends_connected = False  # workers end with the driver, which would start others in place of these

    def __init__(self, job: Job, restarts: bool, listener: Listener | None = None) -> None:
        super().__init__(job, listener)
        self._restarts = restarts
        self._told_to_end: set[str] = set()  # by this process, as they hang or cannot go on
        self._fatal = False
        self._hung: str | None = None
        self.ended: list[exits.RankEnd] = []  # all that have ended, except those that Horovod has removed

    @property
    def failed(self) -> bool:
        return self._fatal or self._hung is not None

    @property
    def stops_gracefully(self) -> bool:
        return super().stops_gracefully and self._succeeded

    @property
    def _succeeded(self) -> bool:
        return self.launcher_end is not None and self.launcher_end["exit_code"] == 0

    def fault(self) -> BaseException | None:
        fatal = blame.judge(end for end in self.ended if end.failed and end.record is not None and not end.secondary)
        if fatal is not None:
            return blame.failure(self._job, fatal)
        if self._hung is not None:
            return RunError(self._hung)
        driver = self.launcher_end
        if self._succeeded:
            return None
        if driver is None or driver["signal"]:
            how = "the agent of Horovod's elastic driver was killed"
            if driver is not None:
                how = f"Horovod's elastic driver was killed by {exits.signal_name(driver['signal'])}"
            return RunError(f"{how}, and all ranks with it; go on with --resume")
        lost = blame.judge(self.ended)
        if lost is None:
            output = exits.shown_tail("its output", driver["tail"])
            return RunError(f"Horovod's elastic driver ended with exit code {driver['exit_code']}; {output}")
        assert self._job.elastic is not None
        return RunError(
            f"Horovod's elastic driver gave up: {len(self.ends)} rank(s) were lost, expected at least "
            f"{self._job.elastic.min_np} (elastic.min_np) to go on; the first lost: {blame.failure(self._job, lost)}"
        )

    def note_start(self, report: dict[str, Any]) -> None:
        name = report["name"]
        if len(self._ranks) >= self._job.np:
            _print(f"{name} joins" if name not in self._ranks else f"{name} is started again")
        self._ranks[name] = report["rank"], report["host"] or "?"
        self.ends.pop(name, None)

    def note_link_down(self, report: dict[str, Any]) -> None:
        _print(f"{report['name']}: its host's interface {report['interface']} is down")

    def note_end(self, end: exits.RankEnd) -> None:
        self.hangs.pop(end.name, None)
        removed = end.record is None and REMOVED in end.tail
        if not removed:
            self.ended.append(end)
        lost = end.failed or end.name in self._told_to_end
        if not lost or self._stopped_at is not None:
            return
        if end.record is not None and not end.secondary:
            self._fatal = True
        elif removed:
            _print(f"{end.name} leaves: its host is not there any more")
        else:
            trains = not self._restarts or self._any_trains()
            then = "training goes on with the others" if trains else "none is training, so all begin anew"
            _print(f"{end.name} {_how(end)}; {then}")
            if not trains:
                self._kill(*self._pids.keys() - self.ends.keys())

    def enforce(self) -> None:
        super().enforce()
        if self.hangs_settled:
            name = min(self.hangs, key=lambda name: self.hangs[name].order)
            hang = self.hangs[name]
            waits = open_collectives(stall for stall in self.stalls.values() if stall.received >= hang.since)
            hung, hosts = {each.rank for each in self.hangs.values()}, dict(self._ranks.values())
            named = [each.text(hung, hosts) for each in waits]
            what = "; ".join([*named, f"{name} hangs: no progress for {hang.seconds:.0f} s, {hang.doing}"])
            self.hangs.clear()
            if self._listener is not None or self._job.here or is_this_machine(hang.host):
                _print(f"{what}; it is ended")
                self._kill(name)
            else:
                self._hung = f"{what}; it is on another host, so all ranks were ended; go on with --resume"

    def _any_trains(self) -> bool:
        """Whether a worker that is left has finished Horovod's start. If none has, all wait long for the lost one."""
        left = self._pids.keys() - self.ends.keys()
        return not left or any(phase_of(self._job.log_dir / f"{name}.beat") != STARTING for name in left)

    def _kill(self, *names: str) -> None:
        """End these workers, as if they were lost."""
        self._told_to_end.update(names)
        for name in names:
            if not self._streams.end_connected(name):
                with contextlib.suppress(OSError):
                    os.kill(self._pids[name], signal.SIGKILL)


def _how(end: exits.RankEnd) -> str:
    """How a worker was lost."""
    after = "" if end.seconds is None else f" after {end.seconds:.1f} s"
    if end.signal is None and end.exit_code is None:
        return f"vanished{after}"
    if end.stopped:
        return f"was ended{after}"
    return f"was killed by {end.signal}{after}" if end.signal else f"ended with exit code {end.exit_code}{after}"


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def phase_of(beat: Path) -> str:
    """The phase that a rank has written to its file; STARTING where it has written none."""
    try:
        return beat.read_text().split(" ", 2)[2].strip()
    except (OSError, IndexError):
        return STARTING
