"""Data sets, their division among ranks, augmentation and batches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `size` equal parts. `local_rank` and `local_size` count the parts that one host reads."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
