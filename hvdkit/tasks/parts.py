"""Models divided over ranks, as data: which blocks a stage has, and how a layer's tensors are cut.

A layer is cut as in Shoeybi et al. 2019, section 3: a matrix by columns where its outputs go on divided, by rows where
its inputs come divided and the ranks' products are added up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hvdkit.errors import RequestError

if TYPE_CHECKING:
    from hvdkit.recipe.communication import Parallel


class Place(Protocol):
    """A rank's place among those that have the other parts: `core.group.Group`."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class NthPlace:
    """A place, without the others."""

    index: int
    size: int


class BlockRange(NamedTuple):
    """The blocks from `start` up to `stop` of a model with `blocks` of them; the first has what comes before them, the
    last what comes after."""

    start: int
    stop: int
    blocks: int

    @property
    def is_first(self) -> bool:
        """Whether this is the stage that gets the samples."""
        return self.start == 0

    @property
    def is_last(self) -> bool:
        """Whether this is the stage that computes the loss."""
        return self.stop == self.blocks


class Cut(NamedTuple):
    """A tensor is divided along an `axis`, where it is so many equal `blocks` side by side: each rank has the same part
    of each. Parts have the same length if they must be `equal`; else they may differ by one."""

    axis: int
    blocks: int = 1
    equal: bool = True


def bounds(total: int, index: int, size: int) -> tuple[int, int]:
    """The first of `total` things that are of part `index` of `size`, and the first that is of the next."""
    return index * total // size, (index + 1) * total // size


def block_of(parameter: str) -> str:
    """The block of a parameter: its name up to a number, such as `layer1.0`; else its layer, such as `conv1`."""
    words = parameter.split(".")
    numbered = next((index for index, word in enumerate(words) if word.isdigit()), len(words) - 2)
    return ".".join(words[: numbered + 1])


def stage_of(parallel: Parallel, index: int, work: Sequence[float]) -> BlockRange:
    """Run `index` of those into which a chain of blocks is cut that take so much work.

    `split: auto` is even here; `core/cuts.py` knows the schedule too, and gives numbers.
    """
    split = evenly(tuple(work), parallel.runs) if parallel.split == "auto" else parallel.split
    start = sum(split[:index])
    return BlockRange(start, start + split[index], len(work))


@lru_cache(maxsize=256)
def evenly(work: tuple[float, ...], runs: int) -> list[int]:
    """As `balanced`, remembered."""
    return balanced(work, runs)


def balanced(work: Sequence[float], runs: int, kept: Sequence[Sequence[float]] = (), room: float = inf) -> list[int]:
    """How many elements of a chain each of `runs` runs has, at least one, so that the most work of one is the least.

    Exactly, by dynamic programming over the ends of runs; among the best cuts that with the least sum of squares. With
    `kept`, what each run would keep of each element, none keeps more than `room`, or than the least that is possible.
    """
    count, ends = len(work), [list(accumulate(work, initial=0))] * runs
    held = [list(accumulate(of, initial=0)) for of in kept] or [[0] * (count + 1)] * runs
    room = max(room, _least(held, held, inf)) if kept else room
    most = _least(ends, held, room)
    squares, cuts = [0.0, *[inf] * count], list[list[int]]()
    for k in range(runs):
        least, cut_at = [inf] * (count + 1), [0] * (count + 1)
        for stop in range(k + 1, count + 1):
            for cut in range(stop - 1, k - 1, -1):
                size = ends[k][stop] - ends[k][cut]
                if size > most or held[k][stop] - held[k][cut] > room:
                    break
                if squares[cut] + size * size < least[stop]:
                    least[stop], cut_at[stop] = squares[cut] + size * size, cut
        squares = least
        cuts.append(cut_at)
    split, stop = list[int](), count
    for cut_at in reversed(cuts):
        split.insert(0, stop - cut_at[stop])
        stop = cut_at[stop]
    return split


def _least(ends: Sequence[Sequence[float]], held: Sequence[Sequence[float]], room: float) -> float:
    """The least that the largest run can be, if none keeps more than `room`; both are sums up to each end, by run."""
    count = len(ends[0]) - 1
    least = [0.0, *[inf] * count]  # the largest run, if the first so many elements are the first runs
    for k in range(len(ends)):
        before, least = least, [inf] * (count + 1)
        for stop in range(k + 1, count + 1):
            for cut in range(stop - 1, k - 1, -1):
                size = ends[k][stop] - ends[k][cut]
                if size >= least[stop] or held[k][stop] - held[k][cut] > room:  # earlier cuts make it longer
                    break
                least[stop] = min(least[stop], max(before[cut], size))
    return least[count]


def check_stages(parallel: Parallel, blocks: int) -> None:
    """Raise RequestError unless a chain of so many blocks can be cut so."""
    if parallel.runs > blocks:
        key, what = ("pipeline", "stages") if parallel.chunks == 1 else ("chunks", "chunks in all stages")
        raise RequestError(
            f"parallel.{key}: expected at most {blocks} {what}, as the model has {blocks} blocks, got {parallel.runs}"
        )
    if parallel.split != "auto" and sum(parallel.split) != blocks:
        raise RequestError(
            f"parallel.split: expected {blocks} blocks together, as the model has, got {sum(parallel.split)}"
        )
    if not isinstance(parallel.costs, str) and len(parallel.costs) != blocks:
        raise RequestError(
            f"parallel.costs: expected {blocks} times, one of each of the model's blocks, got {len(parallel.costs)}"
        )
