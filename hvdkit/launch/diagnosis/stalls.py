"""Which rank hangs, where, and the error that names it, with the collective that the others wait in.

Collectives that only some ranks entered are those that Horovod's stall inspector reports (agent/output.py).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import hvdkit
from hvdkit.errors import RunError
from hvdkit.files import write_atomic
from hvdkit.heartbeat import STARTING
from hvdkit.launch.agent.watchdog import PROGRAM
from hvdkit.launch.diagnosis.exits import RankEnd, RankFailure, rank_failure
from hvdkit.launch.job import STACKS, Job

# Frames that are not in the user's files: packages, the standard library, hvdkit's own.
_NOT_THEIRS = re.compile(rf"/(site|dist)-packages/|/lib/python3|\({re.escape(str(Path(hvdkit.__file__).parent))}/|\(<")
_KIND = re.compile(
    r"(?:Horovod|horovod_|hvd_)?(?:Grouped|grouped_)?(?P<kind>allreduce|allgather|broadcast|alltoall|reducescatter)"
    r"[._]?(?P<name>.*)",
    re.IGNORECASE,
)
_OF_A_GROUP = re.compile(r"_\d+of\d+$")  # what Horovod adds to the names of a grouped collective
_NAMES_SHOWN, _RANKS_SHOWN = 3, 8


@dataclass(frozen=True)
class Hang:
    """A rank that has made no progress for `seconds`, and where. `frames` are innermost first (watchdog.py).

    `seconds` is None for a rank that others wait for, and that made progress until it was ended. A program without
    heartbeats may be `busy`, it prints nothing and computes, or `blocked`: its main thread has not woken up meanwhile.
    """

    rank: int
    host: str
    step: int | None
    phase: str
    seconds: float | None
    frozen: bool
    frames: list[str]
    noticed_at: float  # by the launcher's monotonic clock
    busy: bool = False
    blocked: bool = False

    @classmethod
    def read(cls, report: Mapping[str, Any], host: str, received: float) -> Hang:
        """From an agent's report."""
        same = {key: report[key] for key in ("rank", "step", "phase", "seconds", "frozen", "frames")}
        program = {key: report.get(key, False) for key in ("busy", "blocked")}
        return cls(host=host, noticed_at=received, **program, **same)

    @classmethod
    def of_end(cls, end: RankEnd) -> Hang | None:
        """What a rank did when it was ended; None where that is not known."""
        if end.activity is None:
            return None
        return cls.read({**end.activity, "rank": end.rank, "seconds": None}, end.host, end.reported_at)

    @property
    def since(self) -> float:
        """When it stopped making progress, by the launcher's monotonic clock."""
        return self.noticed_at - (self.seconds or 0.0)

    def at(self, now: float) -> Hang:
        """The same hang, as it is `now`."""
        return replace(self, seconds=now - self.since, noticed_at=now)

    @property
    def waiting(self) -> bool:
        """Whether it waits for other ranks: its frames are in a collective, or it waits for its step's results."""
        return self.phase == "end of step" or any("/horovod/" in frame for frame in self.frames)

    @property
    def perhaps_waits(self) -> bool:
        """Whether it has made no update since Horovod started, so that it may wait for a rank that compiles."""
        return not (self.frozen or self.step or self.phase == STARTING)

    @property
    def order(self) -> tuple[bool, int, bool, bool]:
        """Others wait for the smallest: a rank that is frozen, or behind, or in neither a collective nor a library."""
        in_library = bool(self.frames) and "/site-packages/" in self.frames[0] and "/hvdkit/" not in self.frames[0]
        return not self.frozen, -1 if self.step is None else self.step, self.waiting, in_library

    @property
    def doing(self) -> str:
        """What it does, in words."""
        if self.frozen:
            return "frozen by a signal (SIGSTOP, or a debugger)"
        executing = f", executing {self.frames[0]}" if self.frames else ""
        theirs = next((frame for frame in self.frames if not _NOT_THEIRS.search(frame)), None)
        called = f", called in {theirs}" if theirs and theirs != self.frames[0] else ""
        return f"in phase {self.phase!r}{executing}{called}" if self.phase != PROGRAM else f"{executing}{called}"[2:]

    @property
    def state(self) -> str:
        """Whether it makes progress, where, and what it does."""
        if self.phase == PROGRAM:
            still = "without output, while it computes or waits for a disk," if self.busy else "without output or work"
            quiet = "proceeds" if self.seconds is None else f"{still} for {self.seconds:.0f} s"
            return f"{quiet}, {self.doing}" if self.doing else quiet
        where = "before its first step" if self.step is None else f"at step {self.step}"
        if self.seconds is None:
            return f"proceeds {where}, {self.doing}"
        return f"{where}: no progress for {self.seconds:.0f} s, {self.doing}"

    @property
    def stack(self) -> str:
        """Its lines of stacks.txt."""
        frames = self.frames or ["no stack: it is frozen, or does not answer"]
        return "\n".join([f"rank {self.rank} on {self.host}, {self.state}", *(f"    {frame}" for frame in frames), ""])


class Stall(NamedTuple):
    """The tensors that each missing rank did not submit, and when this was `received`, by the launcher's clock."""

    missing: Mapping[int, list[str]]
    received: float

    @classmethod
    def read(cls, report: Mapping[str, Any], received: float) -> Stall:
        """From an agent's report."""
        return cls({int(rank): names for rank, names in report["missing"].items()}, received)


class OpenCollective(NamedTuple):
    """Tensors that wait for the same ranks."""

    tensors: list[str]
    missing: tuple[int, ...]

    def text(self, hung: Collection[int], hosts: Mapping[int, str]) -> str:
        """`allreduce 'gradients' waits: ranks 0, 2 entered it, rank 1 on h2 did not`, where ranks `hung` wait."""
        more = len(self.tensors) - _NAMES_SHOWN
        names = ", ".join(map(shown, self.tensors[:_NAMES_SHOWN])) + (f" and {more} more" if more > 0 else "")
        entered = sorted(set(hung) - set(self.missing))
        inside = f"rank{'s' if len(entered) > 1 else ''} {', '.join(map(str, entered))}" if entered else "others"
        absent = ", ".join(f"rank {rank} on {hosts.get(rank, '?')}" for rank in self.missing)
        wait, it = ("waits", "it") if len(self.tensors) == 1 else ("wait", "them")
        return f"{names} {wait}: {inside} entered {it}, {absent} did not"


def open_collectives(stalls: Iterable[Stall], since: float) -> list[OpenCollective]:
    """Tensors with the same missing ranks together, in the order of these ranks, of what was received `since` then."""
    missing: dict[str, set[int]] = defaultdict(set)
    for stall in stalls:
        for rank, names in stall.missing.items() if stall.received >= since else ():
            for name in names:
                missing[_OF_A_GROUP.sub("", name)].add(rank)
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name, ranks in missing.items():
        groups[tuple(sorted(ranks))].append(name)
    return [OpenCollective(groups[ranks], ranks) for ranks in sorted(groups)]


def shown(tensor: str) -> str:
    """A tensor's name in Horovod, such as `allreduce.gradients`, as `allreduce 'gradients'`."""
    match = _KIND.fullmatch(tensor)
    return f"collective {tensor!r}" if match is None else f"{match['kind'].lower()} {match['name']!r}"


def hang_failure(job: Job, hangs: Collection[Hang], ends: list[RankEnd], stalls: Iterable[Stall] = ()) -> RankFailure:
    """The error that names the rank that hangs, or the ranks where nothing distinguishes one.

    Where Horovod has said which collective some ranks did not enter (`stalls`), it names that and blames one of them.
    The stacks of all these ranks are in logs/stacks.txt.
    """
    waits = open_collectives(stalls, min(hang.since for hang in hangs))
    missing = {rank for wait in waits for rank in wait.missing}
    hung = {hang.rank for hang in hangs}
    others_wait_for = [other for end in ends if end.rank in missing - hung and (other := Hang.of_end(end))]

    def order(hang: Hang) -> tuple[Any, ...]:
        frozen, *rest = hang.order
        return frozen, hang.rank not in missing, *rest

    known = sorted([*hangs, *others_wait_for], key=lambda hang: (order(hang), hang.rank))
    first, by_rank = known[0], sorted(known, key=lambda hang: hang.rank)
    alike = [hang for hang in known if order(hang) == order(first)]
    waiting = hung | {hang.rank for hang in others_wait_for if hang.waiting}  # a slow rank reports its hang too late
    clauses = [wait.text(waiting, {end.rank: end.host for end in ends}) for wait in waits]
    who = ", ".join(f"rank {hang.rank} on {hang.host}" for hang in alike)
    verb = "" if first.seconds is None else "hangs " if len(alike) == 1 else "hang "
    clauses.append(f"{who} {verb}{first.state}")
    blamed = ends[first.rank]
    if first.waiting and not waits:
        clauses.append("it waits for another rank")
        lost = [end for end in ends if not end.known and end.rank not in hung]
        clauses += [
            f"nothing is heard of rank {end.rank} on {end.host}: is its host there?" for end in lost[:_RANKS_SHOWN]
        ]
    if all(hang.phase == STARTING for hang in hangs):  # a rank without a heartbeat has not come as far
        silent = [end for end in ends if end.stopped and end.activity is None and end.rank not in hung]
        clauses += [f"rank {end.rank} on {end.host} has not come so far" for end in silent[:_RANKS_SHOWN]]
        blamed = silent[0] if silent else blamed
    others = [hang for hang in by_rank if hang not in alike]
    clauses += [f"rank {hang.rank} on {hang.host} waits {hang.doing}" for hang in others[:_RANKS_SHOWN]]
    with suppress(RunError):  # a full disk, say
        write_atomic(job.log_dir / STACKS, "\n".join(hang.stack for hang in by_rank))
        clauses.append(f"their stacks: {job.log_dir / STACKS}")
    return rank_failure(job, "; ".join(clauses), blamed)
