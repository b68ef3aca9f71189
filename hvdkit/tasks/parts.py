"""Tensor parallelism as data: how a layer's tensors are divided over a group of ranks.

Shoeybi et al. 2019, section 3. A matrix is cut by columns where its outputs go on divided, by rows where its inputs
come divided and the ranks' products are added up.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Place(Protocol):
    """A rank's place among those that have the other parts: `core.group.Group`."""

    @property
    def index(self) -> int: ...

    @property
    def size(self) -> int: ...


class Cut(NamedTuple):
    """A tensor is divided along an `axis`, where it is so many equal `blocks` side by side: each rank has the same part
    of each. Parts have the same length if they must be `equal`; else they may differ by one."""

    axis: int
    blocks: int = 1
    equal: bool = True


def bounds(total: int, index: int, size: int) -> tuple[int, int]:
    """The first of `total` things that are of part `index` of `size`, and the first that is of the next."""
    return index * total // size, (index + 1) * total // size
