"""Which rank hangs, where, and how to say so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdkit.launch.diagnosis.exits import RankEnd, RankFailure, shown_tail
from hvdkit.launch.job import Job


@dataclass(frozen=True)
class Stall:
    """A rank that has not moved for `seconds`: where it stands. `frames` are innermost first (pulse.py)."""

    rank: int
    host: str
    step: int | None
    phase: str
    seconds: float
    frozen: bool
    frames: tuple[str, ...]

    @classmethod
    def read(cls, report: dict[str, Any], host: str) -> Stall:
        """From a guard's report."""
        seconds, frames = float(report["seconds"]), tuple(map(str, report["frames"]))
        return cls(report["rank"], host, report["step"], str(report["phase"]), seconds, bool(report["frozen"]), frames)

    @property
    def waiting(self) -> bool:
        """Whether it waits for other ranks: in a collective as far as its frames tell, or for its step's results."""
        return self.phase == "end of step" or any(
            "/horovod/" in frame or frame.startswith("_wait_for_ranks ") for frame in self.frames
        )

    @property
    def in_library(self) -> bool:
        """Whether it executes a package's code, as a rank does that waits inside its framework."""
        return bool(self.frames) and "/site-packages/" in self.frames[0] and "/hvdkit/" not in self.frames[0]

    @property
    def order(self) -> tuple[bool, int, bool, bool]:
        """The smallest is the one that others wait for: frozen, or behind, or neither in a collective nor a library."""
        return not self.frozen, -1 if self.step is None else self.step, self.waiting, self.in_library

    @property
    def doing(self) -> str:
        """What it is at, in words."""
        if self.frozen:
            return "frozen by a signal (SIGSTOP, or a debugger)"
        executing = f", executing {self.frames[0]}" if self.frames else ""
        return f"in phase {self.phase!r}{executing}"


def stall_failure(job: Job, stalls: list[Stall], ends: list[RankEnd]) -> RankFailure:
    """The error that tells the user which rank hangs, or which ranks where nothing sets one apart."""
    first = min(stalls, key=lambda stall: (stall.order, stall.rank))
    alike = sorted((stall for stall in stalls if stall.order == first.order), key=lambda stall: stall.rank)
    others = sorted((stall for stall in stalls if stall.order != first.order), key=lambda stall: stall.rank)
    who = ", ".join(f"rank {stall.rank} on {stall.host}" for stall in alike)
    where = "before its first step" if first.step is None else f"at step {first.step}"
    told = [
        f"{who} {'hangs' if len(alike) == 1 else 'hang'} {where}: no progress for {first.seconds:.0f} s, {first.doing}"
    ]
    if first.waiting:
        told.append("it waits for another rank")
    told += [f"rank {stall.rank} on {stall.host} waits {stall.doing}" for stall in others[:8]]
    end = ends[first.rank]
    told += ["all ranks were ended", shown_tail(f"its log, {job.log(first.rank)}", end.tail)]
    return RankFailure("; ".join(told), end)
