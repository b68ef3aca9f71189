"""Collectives that only some ranks entered, as Horovod's stall inspector reports them (agent/output.py)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_KIND = re.compile(
    r"(?:Horovod|horovod_|hvd_)?(?:Grouped|grouped_)?(?P<kind>allreduce|allgather|broadcast|alltoall|reducescatter)"
    r"[._]?(?P<name>.*)",
    re.IGNORECASE,
)
_OF_A_GROUP = re.compile(r"_\d+of\d+$")  # what Horovod adds to the names of a grouped collective
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class Stall:
    """The tensors that each missing rank did not submit, and when this was `received`, by the launcher's clock."""

    missing: Mapping[int, list[str]]
    received: float

    @classmethod
    def read(cls, report: Mapping[str, Any], received: float) -> Stall:
        """From an agent's report."""
        return cls({int(rank): names for rank, names in report["missing"].items()}, received)


@dataclass(frozen=True)
class OpenCollective:
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


def open_collectives(stalls: Iterable[Stall]) -> list[OpenCollective]:
    """What the stalls come to: tensors with the same missing ranks together, in the order of these ranks."""
    missing: dict[str, set[int]] = defaultdict(set)
    for stall in stalls:
        for rank, names in stall.missing.items():
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
