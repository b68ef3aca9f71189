"""Rank agents as processes: start them, take in what they report, end them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

from hvdkit.errors import RunError, Stopped
from hvdkit.handshake import Listener
from hvdkit.heartbeat import DISK, STOP, WAITING
from hvdkit.launch.agent.watchdog import BUSY_FACTOR
from hvdkit.launch.diagnosis import exits
from hvdkit.launch.diagnosis.quiet import Quiet
from hvdkit.launch.diagnosis.stalls import Hang, Stall
from hvdkit.launch.job import LAUNCHER_GRACE_S, MARK, SETTLE_SHARE, AgentCommand, Job, Tick, agent_command
from hvdkit.launch.streams import AgentStream, Clocks, Streams

_TICK_S = 0.1
# An agent that takes this much longer than its grace is killed. It needs rank_agent.AFTERMATH_S and a walk through
# /proc, on a busy machine too.
_MARGIN_S = 5.0


class Agents:
    """All agents of one job, and what they have reported. A subclass decides when and why the job ends.

    Ranks go by the name of their files: rank-<r>, or worker-<place> in an elastic run. Agents that a program of the
    cluster starts connect to `listener`.
    """

    _ends_connected = True  # whether `stop` asks agents that are connected to end, or only the program that starts them

    def __init__(self, job: Job, listener: Listener | None = None) -> None:
        self._job = job
        self._listener = listener
        self._streams = Streams(listener)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._clocks = Clocks()
        self._to_clean: set[str] = set()  # ranks whose agents have not reported that no process is left
        self._stopped_at: float | None = None
        self._preempted_at: float | None = None
        self._hurried = False
        self._ranks: dict[str, tuple[int, str]] = {}  # rank and host, by name
        self._pids: dict[str, int] = {}
        self.hangs: dict[str, Hang] = {}
        self.stalls: dict[str, Stall] = {}  # the last that each rank's Horovod has named
        self.ends: dict[str, exits.RankEnd] = {}
        self.launcher_end: dict[str, Any] | None = None
        self._quiet = Quiet(job.stall_timeout_s) if job.program else None

    def run(self, commands: list[AgentCommand], on_tick: Tick | None) -> None:
        """Run the commands to their end, calling `on_tick` every 0.1 s from this thread; writes exits.json.

        SIGINT, SIGTERM and SIGHUP end all ranks, then KeyboardInterrupt or Terminated is raised, or Stopped where they
        have ended by themselves. Raises what `fault` returns, and RunError where no process can be started or
        exits.json cannot be written. What `on_tick` raises ends all ranks too.
        """
        with caught_signals() as caught:
            try:
                for command in commands:
                    self._start(command)
                handled = 0
                while self._streams.open:
                    self._listen()
                    if len(caught) > handled and self._may_preempt(caught):
                        self._preempt()
                    elif len(caught) > handled or self.must_stop:
                        self.stop(again=len(caught) > handled)
                    handled = len(caught)
                    self.enforce()
                    if on_tick is not None:
                        on_tick()
            finally:
                # Whatever happened, an exception of on_tick too, no process is left.
                self._end()
        fault: BaseException | None
        if self.stops_gracefully:
            fault = Stopped(f"stopped by {exits.signal_name(caught[0])}")
        elif caught:
            fault = KeyboardInterrupt() if signal.SIGINT in caught else exits.Terminated(caught[0])
        else:
            fault = self.fault()
        try:
            exits.write_exits(self._job.log_dir / "exits.json", self.all_ends())
        except RunError:
            if fault is None:  # else what ended the run matters more
                raise
        if fault is not None:
            raise fault

    def _start(self, command: AgentCommand) -> None:
        """Start one agent with its command."""
        role = command.name if command.rank is None else "rank"
        line = agent_command(sys.executable, role, self._job, command.command)
        try:
            process = subprocess.Popen(
                line,
                env=command.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise RunError(f"{line[0]}: no process can be started ({error.strerror}); see `ulimit -u`") from error
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._processes.append(process)
        name = None if command.rank is None else f"rank-{command.rank}"
        self._streams.add(process.stdout, AgentStream(process, name=name))

    @property
    def must_stop(self) -> bool:
        """Whether to end all ranks now: the job has failed, or ranks have not ended in time after SIGTERM."""
        patience_ends = (self._preempted_at or float("inf")) + self._job.preemption_grace_s
        return self._stopped_at is None and (time.monotonic() > patience_ends or self.failed)

    @property
    def failed(self) -> bool:
        """Whether enough is known to end the job for what a rank did."""
        raise NotImplementedError

    @property
    def hangs_settled(self) -> bool:
        """Whether ranks hang, and other agents have had the time to report theirs.

        Those that have made no update may wait for one that compiles, of which no hang is reported as soon.
        """
        first = min((hang.noticed_at for hang in self.hangs.values()), default=float("inf"))
        sure = self.hangs.keys() | self.ends.keys() >= self._pids.keys()
        sure = sure or not all(hang.perhaps_waits for hang in self.hangs.values())
        return time.monotonic() > first + (SETTLE_SHARE if sure else BUSY_FACTOR) * self._job.stall_timeout_s

    @property
    def all_gone(self) -> bool:
        """Whether every rank is known to have ended."""
        return len(self.ends) == len(self._ranks)

    @property
    def stops_gracefully(self) -> bool:
        """Whether the ranks were asked to end by themselves, for a signal, and none was killed."""
        return self._preempted_at is not None and self._stopped_at is None

    def fault(self) -> BaseException | None:
        """Why the job failed; None where it did not."""
        raise NotImplementedError

    def all_ends(self) -> list[exits.RankEnd]:
        """How each rank ended, in the order of ranks or of starts; mostly empty for a rank that nothing is known of."""
        stopped = self._stopped_at is not None
        return [
            self.ends.get(name) or exits.RankEnd(rank, host, self._pids.get(name), stopped=stopped, name=name)
            for name, (rank, host) in self._ranks.items()
        ]

    def note(self, report: dict[str, Any], received: float) -> None:
        """Take in one report of a rank's agent, which came at `received` of this machine's monotonic clock."""
        name, event = report["name"], report["event"]
        if event == "started":
            self.note_start(report)
            self._pids[name] = report["pid"]
        elif event == "hung":
            # A frozen rank is what rank 0 waits for, not the disk.
            if report["phase"] != WAITING and (report["phase"] != DISK or report["frozen"]):
                self.hangs[name] = Hang.read(report, self._host(report), received)
        elif event == "stalled":
            self.stalls[name] = Stall.read(report, received)
        elif event == "said":
            text = str(report["text"])
            tell(text if text.isprintable() else repr(text))
        elif event == "resumed":
            self.hangs.pop(name, None)
        elif event == "link down":
            self.note_link_down(report)
        elif name not in self.ends:  # an agent's report of an end counts more than that it was killed afterwards
            read = {
                "host": self._host(report),
                "signal": exits.signal_name(report["signal"]),
                "seconds": report.get("seconds") and round(report["seconds"], 3),
                "failed_at": self._clocks.here(name, report["failed_at"]),
                "reported_at": received,
                "record": exits.FailureRecord.read(report.get("failure")),
            }
            known = {key: value for key, value in report.items() if key in exits.RankEnd.__dataclass_fields__}
            self._note_end(name, known | read)

    def note_start(self, report: dict[str, Any]) -> None:
        """A rank has started."""

    def note_end(self, end: exits.RankEnd) -> None:
        """A rank has ended."""

    def note_said(self, report: dict[str, Any]) -> None:
        """The program that starts ranks reports something."""

    def note_link_down(self, report: dict[str, Any]) -> None:
        """The network interface of a rank's host is down."""
        raise NotImplementedError

    def _listen(self) -> None:
        """Take in what agents report within a tick."""
        for stream, report, received in self._streams.read(_TICK_S):
            if report is None:
                self._note_lost_agent(stream)
                continue
            name, event = report["name"], report["event"]
            self._clocks.note(name, report["clock"], report.get("boot"), received)
            if report["rank"] is None:
                if event == "ended":
                    self.launcher_end = report
                else:
                    self.note_said(report)
            elif event == "left":
                self._to_clean.discard(name)
            else:
                if event == "started":
                    self._to_clean.add(name)
                    stream.name = stream.name if stream.connection is None else name
                self.note(report, received)

    def _note_lost_agent(self, stream: AgentStream) -> None:
        """A stream has ended: an agent that has not reported the end of its rank was killed, and the rank with it."""
        if stream.name in self.ends or stream.name not in self._ranks:
            return
        code, now = 0 if stream.process is None else stream.process.wait(), time.monotonic()
        rank, host = self._ranks[stream.name]
        killed = {"signal": exits.signal_name(-code) if code < 0 else None, "stopped": self._stopped_at is not None}
        self._note_end(stream.name, {"rank": rank, "host": host, "failed_at": now, "reported_at": now, **killed})

    def _note_end(self, name: str, facts: dict[str, Any]) -> None:
        self.ends[name] = end = exits.RankEnd(**{"pid": self._pids.get(name), **facts, "name": name})
        self.note_end(end)

    def _host(self, report: dict[str, Any]) -> str:
        """The host of the rank that is reported of."""
        known = self._ranks.get(report["name"])
        return known[1] if known else report["host"] or "?"

    def _may_preempt(self, caught: list[int]) -> bool:
        """Whether ranks may end by themselves: on the first signal, unless it is Ctrl-C, if the job has time for it."""
        first = caught in ([signal.SIGTERM], [signal.SIGHUP])
        return self._job.preemption_grace_s > 0 and first and self._stopped_at is None

    def _preempt(self) -> None:
        """Ask the ranks to end by themselves, after a checkpoint."""
        self._preempted_at = time.monotonic()
        try:
            self._job.stop_file.touch()
        except OSError:  # a full disk, which allows no checkpoint either
            self.stop()
        self._streams.send(STOP)  # a network file system may show the file late

    def stop(self, again: bool = False) -> None:
        """Ask every agent to end its command. With `again` (a second Ctrl-C) agents give no further grace."""
        if self._stopped_at is None:
            self._stopped_at = time.monotonic()
        elif not again:
            return
        connected = self._ends_connected and self._streams.end_connected()
        if again or not connected:
            self._signal_all(signal.SIGTERM)

    def enforce(self) -> None:
        """After `stop`: end the program that starts ranks once they are gone, and kill agents that take too long."""
        if self._stopped_at is None:
            return
        # Tasks of srun and mpirun end by themselves, and their program with them.
        waits = self._listener is None and self.launcher_end is None
        if waits and self.all_gone and not self._to_clean and not self._hurried:
            self._hurried = True
            self._signal_all(signal.SIGTERM)
        over = time.monotonic() - self._stopped_at - self._job.grace_s - LAUNCHER_GRACE_S
        if over > _MARGIN_S:
            self._signal_all(signal.SIGKILL)  # their commands die with them (PR_SET_PDEATHSIG)
        elif over > _MARGIN_S / 2 and self._listener is not None:
            # A program that waits for a host it cannot reach: asked again, its agent kills it, with its ssh.
            self._hurried = self._hurried or self.launcher_end is None
            self._signal_all(signal.SIGTERM)

    def _program_hangs(self, running: Collection[str]) -> bool:
        """Whether the ranks `running` of a program hang; says it where they are quiet for long."""
        assert self._quiet is not None
        ranks = {name: self._ranks[name] for name in running}
        line = self._quiet.look(self.hangs, ranks, self.stalls.values(), time.monotonic())
        if line is not None:
            tell(line)
        return self._quiet.hang

    def _end(self) -> None:
        """Leave no agent and so no rank; returns within the grace and a little more."""
        if self._streams.open:
            self.stop()
        while self._streams.open:
            self._listen()
            self.enforce()
        for process in self._processes:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
        self._streams.close()
        for pattern in ("*.beat", "*.stack", f"{MARK}*"):  # the first two are of an agent that was killed
            for file in self._job.log_dir.glob(pattern):
                file.unlink(missing_ok=True)

    def _signal_all(self, number: int) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)


def tell(line: str) -> None:
    """Print a line for the user at once."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in the list that this yields; they are handled at the next tick.

    SIGHUP stays ignored where it is, as under nohup.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may set handlers
        return
    before = {
        number: signal.signal(number, lambda received, _: caught.append(received))
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN
    }
    try:
        yield caught
    finally:
        for number, handler in before.items():
            if handler is not None:  # one that was not set from Python, and cannot be set from it
                signal.signal(number, handler)
