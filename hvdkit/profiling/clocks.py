"""All ranks' times by one clock, rank 0's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdkit.results.recording import RankRecord

Meeting = tuple[int, int]  # begin and end of a collective on one rank, nanoseconds


@dataclass(frozen=True)
class Clock:
    """A rank's clock is ahead of rank 0's by `offsets[i]` nanoseconds at its own time `times[i]`, sure to `error`."""

    times: tuple[int, ...] = (0,)
    offsets: tuple[int, ...] = (0,)
    error: int = 0

    def __call__(self, at: int) -> int:
        """Rank 0's time when this rank's is `at`; between two comparisons the offset changes evenly."""
        if len(self.times) < 2 or at <= self.times[0]:
            return at - self.offsets[0]
        if at >= self.times[-1]:
            return at - self.offsets[-1]
        share = (at - self.times[0]) / (self.times[-1] - self.times[0])
        return at - round(self.offsets[0] + share * (self.offsets[-1] - self.offsets[0]))


def clocks(ranks: Sequence[RankRecord]) -> list[Clock]:
    """One a rank. Ranks of one machine have rank 0's clock; others' is found out from where all have met."""
    return [_clock(ranks[0], rank) for rank in ranks]


def _clock(root: RankRecord, rank: RankRecord) -> Clock:
    if rank.rank == root.rank or (rank.boot and rank.boot == root.boot):
        return Clock()
    found = [
        (theirs[len(theirs) // 2][0], *between(ours, theirs))
        for ours, theirs in zip(root.meetings, rank.meetings, strict=True)
        if theirs
    ]
    times, offsets, errors = zip(*found, strict=True)
    return Clock(times, offsets, max(errors))


def between(ours: Sequence[Meeting], theirs: Sequence[Meeting]) -> tuple[int, int]:
    """How far their clock is ahead of ours, and how sure that is, both in nanoseconds.

    No collective ends anywhere before it has begun everywhere: each bounds the offset from both sides.
    """
    low = max(their_begin - our_end for (_, our_end), (their_begin, _) in zip(ours, theirs, strict=True))
    high = min(their_end - our_begin for (our_begin, _), (_, their_end) in zip(ours, theirs, strict=True))
    return (low + high) // 2, max(0, (high - low + 1) // 2)
