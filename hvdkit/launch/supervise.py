"""Follow a fixed number of ranks to their end, and end all when one fails."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import Any

from hvdkit.errors import RunError
from hvdkit.launch.agent.link_monitor import DOWN_S
from hvdkit.launch.agents import STALL_SETTLE_SHARE, Crew, Guarded
from hvdkit.launch.diagnosis import blame, exits
from hvdkit.launch.diagnosis.hangs import Stall, stall_failure
from hvdkit.launch.diagnosis.partition import Cut, cut_failure, unreachable
from hvdkit.launch.job import Job, Tick


def supervise(job: Job, commands: list[Guarded], on_tick: Tick | None) -> None:
    """Run the commands to their end, calling `on_tick` every 0.1 s from this thread; writes exits.json.

    Raises RankFailure where a rank fails or hangs (RequestError where it found the request wrong), after ending the
    others: within GRACE_S + 2 s, which begin after job.settle_s where ranks have only lost another one. SIGINT and
    SIGTERM end all ranks likewise, then KeyboardInterrupt or Terminated is raised. RunError where no process can be
    started, horovodrun fails or exits.json cannot be written. What `on_tick` raises ends all ranks too.
    """
    crew = _Ranks(job)
    caught = crew.follow(commands, on_tick)
    final = crew.all_ends()
    conclude(job, final, _fault(job, crew, final, caught))


def conclude(job: Job, final: list[exits.RankEnd], fault: BaseException | None) -> None:
    """Write exits.json; raise the fault, if there is one."""
    try:
        exits.write_exits(job.log_dir / "exits.json", final)
    except RunError:
        # What ended the run matters more than that its end could not be written down.
        if fault is None:
            raise
    if fault is not None:
        raise fault


def by_signal(caught: list[int]) -> BaseException | None:
    """What SIGINT or SIGTERM makes of a run; None where none came."""
    if signal.SIGINT in caught:
        return KeyboardInterrupt()
    return exits.Terminated("ended by SIGTERM, and all ranks with it") if caught else None


def _fault(job: Job, crew: _Ranks, final: list[exits.RankEnd], caught: list[int]) -> BaseException | None:
    """What the caller has to hear; None where all is well."""
    if caught:
        return None if crew.left_in_order else by_signal(caught)
    verdict = blame.judge(final)
    first = None if verdict is None else verdict.end
    own = first is not None and first.cause in (exits.Cause.OWN, exits.Cause.FROZEN, exits.Cause.UNKNOWN)
    if crew.cut is not None and not (first is not None and own and first.failed_at < crew.cut.since):
        return cut_failure(job, crew.cut, final)
    if not own:
        severed = unreachable(job, final)
        if severed is not None:
            return severed
        if crew.stalls:
            return stall_failure(job, list(crew.stalls.values()), final)
    horovodrun = crew.horovodrun_end
    if (
        horovodrun is not None
        and horovodrun["exit_code"] != 0
        and (verdict is None or not (verdict.end.known or verdict.lost_by))
    ):
        return _horovodrun_failure(job, horovodrun, [end for end in final if not end.known])
    return None if verdict is None else blame.failure(job, verdict)


def _horovodrun_failure(job: Job, end: dict[str, Any], unknown: list[exits.RankEnd]) -> RunError:
    """horovodrun failed by itself, or lost its connection to a rank."""
    code, number = end["exit_code"], end["signal"]
    how = f"ended with exit code {code}" if number is None else f"was killed by {exits.signal_name(number)}"
    ranks = ", ".join(f"rank {lost.rank} on {lost.host}" for lost in unknown)
    of_ranks = f"; nothing is known of the end of {ranks}" if unknown else ""
    log = exits.shown_tail(f"its output, {job.log_dir / 'horovodrun.log'}", end["tail"])
    return RunError(f"horovodrun {how}{of_ranks}; where other hosts are named, check `ssh HOST true` for each; {log}")


class _Ranks(Crew):
    """The guards of as many ranks as the job has, and what they have told."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._hosts = {slot.rank: slot.hostname for slot in job.slots()}
        self._pids: dict[int, int] = {}
        self._ends: dict[int, exits.RankEnd] = {}
        self._stalled_at: float | None = None
        self.stalls: dict[int, Stall] = {}
        self.cut: Cut | None = None

    @property
    def must_stop(self) -> bool:
        """Whether a rank's failure is reason to end the others now."""
        if self._stopped_at is not None:
            return False
        if self.overdue or self.cut is not None:
            return True
        if self._stalled_at is not None:
            settled = self._stalled_at + STALL_SETTLE_SHARE * self._job.stall_timeout_s
            if len(self.stalls.keys() | self._ends.keys()) == len(self._hosts) or time.monotonic() > settled:
                return True
        return blame.decided(self._ends.values(), len(self._hosts), time.monotonic(), self._job.settle_s)

    @property
    def all_gone(self) -> bool:
        return len(self._ends) == len(self._hosts)

    def note(self, report: dict[str, Any], received: float) -> None:
        rank, event = report["rank"], report["event"]
        if event == "started":
            self._pids[rank] = report["pid"]
        elif event == "stalled":
            self.stalls[rank] = Stall.read(report, self._hosts[rank])
            self._stalled_at = self._stalled_at or received
        elif event == "resumed":
            self.stalls.pop(rank, None)
            self._stalled_at = self._stalled_at if self.stalls else None
        elif event == "cut off":
            since = self._clocks.here(report["name"], report["clock"]) - DOWN_S
            cut = Cut(rank, self._hosts[rank], report["interface"], report["up"], since)
            self.cut = min(self.cut or cut, cut, key=lambda cut: (cut.since, cut.rank))
        elif rank not in self._ends:  # what a guard tells counts more than that it was killed afterwards
            self._ends[rank] = self.read_end(report, self._hosts[rank], self._pids.get(rank), received)

    def note_silence(self, guard: subprocess.Popen[bytes], rank: int | None) -> None:
        """A guard that did not tell of its rank's end was killed itself, and the rank with it."""
        if rank is None or rank in self._ends:
            return
        code = guard.wait()
        self._ends[rank] = exits.RankEnd(
            rank=rank,
            host=self._hosts[rank],
            pid=self._pids.get(rank),
            signal=exits.signal_name(-code) if code < 0 else None,
            stopped=self._stopped_at is not None,
            failed_at=time.monotonic(),
            heard_at=time.monotonic(),
        )

    @property
    def left_in_order(self) -> bool:
        """Whether all ranks have ended by themselves and well after they were asked to."""
        return (
            self._asked_at is not None
            and self._stopped_at is None
            and not any(end.failed for end in self._ends.values())
            and self.all_gone
        )

    def all_ends(self) -> list[exits.RankEnd]:
        """How each rank ended, in rank order; of a rank whose guard fell silent, what can be known."""
        stopped = self._stopped_at is not None
        return [
            self._ends.get(rank) or exits.RankEnd(rank, host, self._pids.get(rank), stopped=stopped)
            for rank, host in self._hosts.items()
        ]
