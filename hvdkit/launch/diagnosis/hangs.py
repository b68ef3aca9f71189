"""Which rank hangs, where, and the error that names it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdkit.launch.diagnosis.exits import RankEnd, RankFailure, rank_failure
from hvdkit.launch.job import Job


@dataclass(frozen=True)
class Hang:
    """A rank that has made no progress for `seconds`, and where. `frames` are innermost first (watchdog.py)."""

    rank: int
    host: str
    step: int | None
    phase: str
    seconds: float
    frozen: bool
    frames: list[str]
    noticed_at: float  # by the launcher's monotonic clock

    @classmethod
    def read(cls, report: dict[str, Any], host: str, received: float) -> Hang:
        """From an agent's report."""
        same = {key: report[key] for key in ("rank", "step", "phase", "seconds", "frozen", "frames")}
        return cls(host=host, noticed_at=received, **same)

    @property
    def waiting(self) -> bool:
        """Whether it waits for other ranks: its frames are in a collective, or it waits for its step's results."""
        return self.phase == "end of step" or any(
            "/horovod/" in frame or frame.startswith("_wait_for_ranks ") for frame in self.frames
        )

    @property
    def in_library(self) -> bool:
        """Whether it executes code of a package, as a rank that waits inside its framework does."""
        return bool(self.frames) and "/site-packages/" in self.frames[0] and "/hvdkit/" not in self.frames[0]

    @property
    def order(self) -> tuple[bool, int, bool, bool]:
        """Others wait for the smallest: a rank that is frozen, or behind, or in neither a collective nor a library."""
        return not self.frozen, -1 if self.step is None else self.step, self.waiting, self.in_library

    @property
    def doing(self) -> str:
        """What it does, in words."""
        if self.frozen:
            return "frozen by a signal (SIGSTOP, or a debugger)"
        executing = f", executing {self.frames[0]}" if self.frames else ""
        return f"in phase {self.phase!r}{executing}"


def hang_failure(job: Job, hangs: list[Hang], ends: list[RankEnd]) -> RankFailure:
    """The error that names the rank that hangs, or the ranks where nothing distinguishes one."""
    hangs = sorted(hangs, key=lambda hang: (hang.order, hang.rank))
    first = hangs[0]
    alike = [hang for hang in hangs if hang.order == first.order]
    others = sorted(hangs[len(alike) :], key=lambda hang: hang.rank)
    who = ", ".join(f"rank {hang.rank} on {hang.host}" for hang in alike)
    where = "before its first step" if first.step is None else f"at step {first.step}"
    parts = [
        f"{who} {'hangs' if len(alike) == 1 else 'hang'} {where}: no progress for {first.seconds:.0f} s, {first.doing}"
    ]
    if first.waiting:
        parts.append("it waits for another rank")
    parts += [f"rank {hang.rank} on {hang.host} waits {hang.doing}" for hang in others[:8]]
    return rank_failure(job, "; ".join(parts), ends[first.rank])
