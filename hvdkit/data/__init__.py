"""Data sets, their division among ranks, augmentation and batches."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.errors import RequestError


@dataclass(frozen=True)
class Shard:
    """Part `rank` of `size` equal parts. `local_rank` and `local_size` count the parts that one host reads."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def check_classes(name: str, needed: int, classes: int) -> None:
    """Raise RequestError if a model of so many classes has fewer than the data set of that name."""
    if classes < needed:
        raise RequestError(f"model.classes: expected at least {needed} for data {name!r}, got {classes}")
