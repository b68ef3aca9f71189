"""Elastic runs: the elastic driver decides which ranks take part, and training continues with those.

A run survives a rank that is killed, frozen or lost with its host. A rank whose own record says that it failed by
itself would fail again: it ends the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdkit.errors import RunError
from hvdkit.handshake import Listener
from hvdkit.launch.agents import Agents, tell
from hvdkit.launch.diagnosis import blame, exits
from hvdkit.launch.diagnosis.stalls import open_collectives
from hvdkit.launch.hosts import is_this_machine
from hvdkit.launch.job import AgentCommand, Job, Tick
from hvdkit.launch.launchers.elastic_rounds import AGAIN

_DRIVER = Path(__file__).with_name("elastic_driver.py")
REMOVED = "has been removed from elastic job"  # what a rank prints whose place is gone, before it ends
_TOGETHER_S = 0.5  # losses are reported together


def driver(job: Job, command: list[str], environment: dict[str, str], name: str = "", **where: object) -> AgentCommand:
    """The elastic driver under the runtime's interpreter, for an elastic job.

    `where` says where it starts workers, and so what `command` is (elastic_driver.py). It goes by `name` in logs.
    """
    assert job.elastic is not None
    settings = {"np": job.np, "places": [], "cluster": False, **asdict(job.elastic), **where}
    line = [str(job.python), str(_DRIVER), json.dumps(settings, default=str), *command]
    return AgentCommand(None, line, environment, name or AgentCommand.name)


def supervise(job: Job, driver: AgentCommand, on_tick: Tick | None, listener: Listener | None = None) -> None:
    """Run the driver and its workers to their end, calling `on_tick` every 0.1 s; writes exits.json.

    Workers that a cluster's program starts connect to `listener`.

    Raises RankFailure or RequestError where a rank fails by its own fault, RunError where too few ranks are left or the
    driver fails, and as `Agents.run` does.
    """
    _Workers(job, listener).run([driver], on_tick)


class _Workers(Agents):
    """The agents of the driver and of its workers."""

    _ends_connected = False  # workers end with the driver, which would start others in place of these

    def __init__(self, job: Job, listener: Listener | None = None) -> None:
        super().__init__(job, listener)
        self._told_to_end: set[str] = set()  # by this process, as they hang
        self._trains = False  # or has trained
        self._resume = "" if job.program else "; continue with --resume"
        self._gave_up: str | None = None
        self._lost: list[str] = []  # what is still to be reported
        self._lost_at = 0.0
        self._hung: str | None = None
        self.ended: list[exits.RankEnd] = []  # all that have ended, except those that Horovod has removed
        self._own: list[exits.RankEnd] = []  # of these, those that end the run

    @property
    def failed(self) -> bool:
        return bool(self._own) or self._hung is not None

    @property
    def stops_gracefully(self) -> bool:
        return super().stops_gracefully and self._succeeded

    @property
    def _succeeded(self) -> bool:
        return self.launcher_end is not None and self.launcher_end["exit_code"] == 0

    def fault(self) -> BaseException | None:
        fatal = blame.judge(self._own)
        if fatal is not None:
            return blame.failure(self._job, fatal)
        if self._hung is not None:
            return RunError(self._hung)
        driver = self.launcher_end
        if self._succeeded:
            return None
        if driver is None or driver["signal"]:
            by = "" if driver is None else f" by {exits.signal_name(driver['signal'])}"
            who = "the agent of the elastic driver" if driver is None else "the elastic driver"
            return RunError(f"{who} was killed{by}, and all ranks with it{self._resume}")
        lost, code = blame.judge(self.ended), f"ended with exit code {driver['exit_code']}"
        if self._gave_up is None and lost is None:
            return RunError(f"the elastic driver {code}; {exits.shown_tail('its output', driver['tail'])}")
        first = "" if lost is None else f"; the first lost: {blame.failure(self._job, lost)}"
        why = self._gave_up or f"it {code}"
        return RunError(f"the elastic driver gave up: {why}{self._resume}{first}")

    def note_start(self, report: dict[str, Any]) -> None:
        name = report["name"]
        if len(self._ranks) >= self._job.np:
            tell(f"{name} is starting" if name not in self._ranks else f"{name} is started again")
        self._ranks[name] = report["rank"], report["host"] or "?"
        self.ends.pop(name, None)

    def note_said(self, report: dict[str, Any]) -> None:
        if report["event"] == ("committed" if self._job.program else "round"):
            self._trains = True
        elif report["event"] == "round" and report["fresh"] and self._trains:
            tell("all ranks run the program from its beginning: no rank is left that has its state")
        elif report["event"] == "unjoined" and report["worker"] not in self._ranks and self._stopped_at is None:
            log = self._job.log(0, AgentCommand.name)
            said = exits.shown_tail("its words", _said_of(log, report["index"]))
            tell(f"{report['worker']} could not be started (exit status {report['status']}), it is left out; {said}")
        elif report["event"] == "gave up":
            self._gave_up = report["text"]
        elif report["event"] == "said" and self._stopped_at is None:
            self._tell_losses()
            tell(report["text"])

    def note_link_down(self, report: dict[str, Any]) -> None:
        tell(f"{report['name']}: its host's interface {report['interface']} is down")

    def note_end(self, end: exits.RankEnd) -> None:
        self.hangs.pop(end.name, None)
        removed = end.record is None and REMOVED in end.tail
        again = end.exit_code == AGAIN and end.record is None
        if not removed and not again:
            self.ended.append(end)
            if self._fails_again(end):
                self._own.append(end)
        if self._stopped_at is not None:
            return
        if removed:
            tell(f"{end.name} leaves: its host is not there any more")
        elif again:
            tell(f"{end.name} starts again: another rank was lost while it connected")
        elif end not in self._own and (end.failed or end.name in self._told_to_end):
            self._lost_at = self._lost_at if self._lost else time.monotonic()
            self._lost.append(f"{end.name} {_how(end)}")

    def _tell_losses(self) -> None:
        """Print the losses of the last moment, and what comes of them."""
        if not self._lost:
            return
        assert self._job.elastic is not None
        left, needed = len(self._pids.keys() - self.ends.keys()), self._job.elastic.min_np
        if not self._trains:
            then = "training has not begun yet"
        elif left == 0:
            then = "no rank is left, so ranks start again" + ("" if self._job.program else " from the last commit")
        elif left < needed:
            then = f"{left} left, and training continues once there are {needed} (elastic.min_np)"
        else:
            then = "training continues with the others"
        tell(f"{', '.join(self._lost)}; {then}")
        self._lost.clear()

    def enforce(self) -> None:
        super().enforce()
        if time.monotonic() > self._lost_at + _TOGETHER_S and self._stopped_at is None:
            self._tell_losses()
        if self._quiet is not None:
            if not self._program_hangs(self._pids.keys() - self.ends.keys()):
                return
            self._quiet.hang = False
        elif not self.hangs_settled:
            return
        name = min(self.hangs, key=lambda name: self.hangs[name].order)
        hang = self.hangs[name]
        hung, hosts = {hang.rank for hang in self.hangs.values()}, dict(self._ranks.values())
        named = [wait.text(hung, hosts) for wait in open_collectives(self.stalls.values(), hang.since)]
        what = "; ".join([*named, f"{name} hangs: no progress for {hang.seconds:.0f} s, {hang.doing}"])
        self.hangs.clear()
        if self._listener is not None or self._job.here or is_this_machine(hang.host):
            tell(f"{what}; it is ended")
            self._kill(name)
        else:
            self._hung = f"{what}; it is on another host, so all ranks were ended{self._resume}"

    def _fails_again(self, end: exits.RankEnd) -> bool:
        """Whether it failed by itself, by its own record: no other rank would do better. Of a program that has trained
        others continue, as long as there are any."""
        own = end.failed and end.record is not None and not end.secondary
        return own and not (self._job.program and self._trains and self._pids.keys() - self.ends.keys())

    def _kill(self, name: str) -> None:
        """End this worker, as if it were lost."""
        self._told_to_end.add(name)
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


def _said_of(log: Path, index: int) -> str:
    """What a worker without an agent has said last: its lines in horovodrun's log."""
    mark = f"[{index}]<stderr>:"
    with contextlib.suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()
        return "\n".join([line.removeprefix(mark) for line in lines if line.startswith(mark)][-3:])
    return ""
