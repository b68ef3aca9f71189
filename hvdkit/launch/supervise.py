"""Follow a fixed number of ranks to their end, and end all when one fails."""

from __future__ import annotations

import signal
import time
from typing import Any

from hvdkit.errors import RunError
from hvdkit.handshake import Listener
from hvdkit.launch.agent.link_monitor import DOWN_S
from hvdkit.launch.agents import Agents, tell
from hvdkit.launch.diagnosis import blame, exits
from hvdkit.launch.diagnosis.stalls import hang_failure
from hvdkit.launch.job import AgentCommand, Job, Tick

# For the program that starts ranks to end after them: srun waits for ever for a task manager that was killed.
LINGERS_S = 30.0


def supervise(job: Job, commands: list[AgentCommand], on_tick: Tick | None, listener: Listener | None = None) -> None:
    """Run the commands to their end, calling `on_tick` every 0.1 s from this thread; writes exits.json.

    Raises RankFailure where a rank fails or hangs (RequestError where the rank found the request wrong), RunError where
    the program that starts them fails, and as `Agents.run` does. The other ranks have been ended then: within
    GRACE_S + 2 s, and where ranks have only lost another one, job.settle_s later.
    """
    _Ranks(job, listener).run(commands, on_tick)


class _Ranks(Agents):
    """The agents of as many ranks as the job has."""

    def __init__(self, job: Job, listener: Listener | None = None) -> None:
        super().__init__(job, listener)
        self._ranks = {f"rank-{slot.rank}": (slot.rank, slot.hostname) for slot in job.slots()}
        # The first interface that went down: since when by this machine's clock, the rank that its agent has, and what.
        self._link_down: tuple[float, int, str] | None = None
        # A program of the cluster may wait for ever where it cannot reach a host.
        self._start_by = time.monotonic() + (job.stall_timeout_s or float("inf"))
        self._overdue = False
        self._gone_at: float | None = None
        self._lingered = False

    @property
    def failed(self) -> bool:
        if self._link_down is not None:
            return True
        if self._listener is not None and not self._pids and time.monotonic() > self._start_by:
            self._overdue = True
            return True
        if self._quiet is not None:
            if self._quiet.hang:
                return True
        elif self.hangs and (self.hangs_settled or self.hangs.keys() | self.ends.keys() == self._ranks.keys()):
            return True
        return blame.decided(self.ends.values(), len(self._ranks), time.monotonic(), self._job.settle_s)

    @property
    def stops_gracefully(self) -> bool:
        return super().stops_gracefully and self.all_gone and not any(end.failed for end in self.ends.values())

    def enforce(self) -> None:
        super().enforce()
        if self._quiet is not None and self._stopped_at is None:
            self._program_hangs(self._ranks.keys() - self.ends.keys())
        waits = self._listener is not None and self.launcher_end is None and self._stopped_at is None
        if not waits or not self.all_gone or self._to_clean or self._lingered:
            return
        self._gone_at = self._gone_at or time.monotonic()
        if time.monotonic() > self._gone_at + LINGERS_S:
            self._lingered = True
            tell(f"what started the ranks has not ended within {LINGERS_S:.0f} s of them; it is ended now")
            self._signal_all(signal.SIGTERM)

    def note_end(self, end: exits.RankEnd) -> None:
        if self._quiet is not None and self._stopped_at is None:
            self.hangs.pop(end.name, None)

    def note_link_down(self, report: dict[str, Any]) -> None:
        since = self._clocks.here(report["name"], report["clock"]) - DOWN_S
        state = "has no carrier" if report["up"] else "is down"
        what = f"host {self._host(report)} is cut off: its interface {report['interface']} {state} for {DOWN_S:.0f} s"
        down = since, report["rank"], f"{what} (rank {report['rank']})"
        self._link_down = min(self._link_down or down, down)

    def fault(self) -> BaseException | None:
        launcher = self.launcher_end
        if self._overdue:
            return self._launcher_failure(launcher or {"name": "the launcher", "tail": ""}, [])
        ends = self.all_ends()
        verdict = blame.judge(ends)
        first = None if verdict is None else verdict.end
        own = first is not None and first.cause <= exits.Cause.TAKEN
        if self._link_down is not None:
            since, rank, what = self._link_down
            if not (first is not None and own and first.failed_at < since):
                return exits.rank_failure(self._job, what, ends[rank])
        # What is killed after a rank's end (`_hurried`) did not cause that.
        explained = verdict is not None and (verdict.end.known or verdict.lost_by or self._hurried)
        launcher_failed = launcher is not None and launcher["exit_code"] != 0 and not explained and not self._lingered
        hangs = list(self.hangs.values())
        if self._quiet is not None:
            hangs = [hang.at(self._stopped_at or hang.noticed_at) for hang in hangs if self._quiet.hang]
        # Packets may be lost for a while, and all ranks end well.
        if not own and (verdict is not None or hangs or launcher_failed):
            partition = blame.unreachable(self._job, ends)
            if partition is not None:
                return partition
            if hangs:
                return hang_failure(self._job, hangs, ends, self.stalls.values())
        if launcher is not None and launcher_failed:
            return self._launcher_failure(launcher, [end for end in ends if not end.known])
        if verdict is None:
            return None
        failure = blame.failure(self._job, verdict)
        if launcher is not None and launcher["tail"].strip() and verdict.end.cause is exits.Cause.TAKEN:
            # What has ended the rank may have said why, such as mpirun that has lost its way to another host.
            failure.args = (f"{failure}; {self._output(launcher)}",)
        return failure

    def _output(self, end: dict[str, Any]) -> str:
        return exits.shown_tail(f"{end['name']}'s output, {self._job.log_dir / end['name']}.log", end["tail"])

    def _launcher_failure(self, end: dict[str, Any], unknown: list[exits.RankEnd]) -> RunError:
        """The program that starts ranks failed by itself, lost its connection to a rank, or started none in time."""
        name, code, number = end["name"], end.get("exit_code"), end.get("signal")
        how = f"ended with exit code {code}" if number is None else f"was killed by {exits.signal_name(number)}"
        if self._overdue:
            how = f"has started no rank within {self._job.stall_timeout_s:g} s (--stall-timeout)"
        ranks = ", ".join(f"rank {lost.rank} on {lost.host}" for lost in unknown)
        of_ranks = f"; nothing is known of the end of {ranks}" if unknown else ""
        check = "; where other hosts are named, check `ssh HOST true` for each" if name == "horovodrun" else ""
        return RunError(f"{name} {how}{of_ranks}{check}; {self._output(end)}")
