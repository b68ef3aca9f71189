"""Data sets, their division among ranks, augmentation and batches."""

from __future__ import annotations

import importlib.util
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


def require(module: str, what: str, install: str, otherwise: str = "") -> None:
    """Raise RequestError if a package is missing; `what` names it and says what it is for."""
    if importlib.util.find_spec(module) is None:
        raise RequestError(
            f"{what}, is not installed beside the framework; run `python -m pip install {install}` there{otherwise}"
        )
