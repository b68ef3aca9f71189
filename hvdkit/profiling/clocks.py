"""Puts the times of all ranks on one clock, rank 0's. Times are nanoseconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdkit.results.recording import RankRecord

Interval = tuple[int, int]  # begin and end of a collective on one rank


@dataclass(frozen=True)
class Clock:
    """A rank's clock is ahead of rank 0's by `offsets[i]` at its own time `times[i]`, with at most `error` of error."""

    times: tuple[int, ...] = (0,)
    offsets: tuple[int, ...] = (0,)
    error: int = 0

    def __call__(self, at: int) -> int:
        """Rank 0's time when this rank's is `at`; between comparisons the offset is interpolated linearly."""
        return at - round(float(np.interp(at, self.times, self.offsets)))


def of_rank(rank: RankRecord, root: RankRecord) -> Clock:
    """The clock of a rank. Ranks on rank 0's machine share its clock; others are compared by small collectives."""
    if rank.rank == root.rank or (rank.boot and rank.boot == root.boot):
        return Clock()
    samples = [
        (theirs[len(theirs) // 2][0], *between(ours, theirs))
        for ours, theirs in zip(root.meetings, rank.meetings, strict=True)
        if theirs
    ]
    times, offsets, errors = zip(*samples, strict=True)
    return Clock(times, offsets, max(errors))


def between(ours: Sequence[Interval], theirs: Sequence[Interval]) -> tuple[int, int]:
    """How far their clock is ahead of ours, and the error of that.

    No collective ends on any rank before it has begun on all ranks, so each bounds the offset from both sides.
    """
    low = max(their_begin - our_end for (_, our_end), (their_begin, _) in zip(ours, theirs, strict=True))
    high = min(their_end - our_begin for (our_begin, _), (_, their_end) in zip(ours, theirs, strict=True))
    return (low + high) // 2, max(0, (high - low + 1) // 2)
