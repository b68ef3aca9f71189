"""Models divided over ranks, as data: which blocks a stage has, and how a layer's tensors are cut.

A layer is cut as in Shoeybi et al. 2019, section 3: a matrix by columns where its outputs go on divided, by rows where
its inputs come divided and the ranks' products are added up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Place(Protocol):
    """A rank's place among those that have the other parts: `core.group.Group`."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...


@dataclass(frozen=True)
class Part:
    """A place, without the others."""

    index: int
    size: int


class Stage(NamedTuple):
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
