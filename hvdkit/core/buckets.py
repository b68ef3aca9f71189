"""Buckets of parameters, which sharding divides equally over ranks.

Sharding divides the parameters into buckets of whole tensors, and each bucket into an equal share for each rank. A
bucket is its tensors' elements, one after the other, and zeros up to a multiple of the number of ranks. It has at most
BUCKET_BYTES, or one larger tensor. Buckets are in the order in which backward computes gradients: the last parameter
first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from hvdkit.core.pieces import BUCKET_BYTES, Part, Piece, Shape

if TYPE_CHECKING:
    from hvdkit.core.group import Group

# Buckets under way, by stage. Horovod fuses those that are sent together, which costs copies; where they are sent one
# after the other in backward, fewer would make ranks wait for each other more often.
BUCKETS_AT_ONCE = {"optimizer": 1, "gradients": 4, "parameters": 2}


@dataclass(frozen=True)
class Bucket:
    """Tensors whose gradients are sent together, by name, for `ranks` ranks."""

    shapes: Mapping[str, Shape]
    ranks: int

    @property
    def size(self) -> int:
        """The number of elements without padding."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def share(self) -> int:
        """The number of elements of each rank's share, with padding."""
        return -(-self.size // self.ranks)

    @property
    def padding(self) -> int:
        """The number of zeros at the end."""
        return self.share * self.ranks - self.size

    def pieces(
        self, rank: int, may_span: bool, groups: tuple[Group, ...] = (), kinds: Mapping[str, int] | None = None
    ) -> list[Piece]:
        """A rank's share. With `may_span` a piece may span several tensors of one of the `kinds`, which are by name,
        and of the same number of dimensions: 0 or 1, or more. Otherwise each piece is of one tensor."""
        parts = list(self._parts(rank * self.share, (rank + 1) * self.share))
        padding = self.share - sum(part.size for part in parts)
        if not parts:  # padding alone: nothing of the last tensor
            name, shape = list(self.shapes.items())[-1]
            parts = [Part(name, shape, math.prod(shape), math.prod(shape))]
        alike = {n: (len(shape) < 2, kinds and kinds[n]) if may_span else n for n, shape in self.shapes.items()}
        runs = [list(run) for _, run in groupby(parts, lambda part: alike[part.name])]
        paddings = [*(0 for _ in runs[1:]), padding]
        return [
            Piece(tuple(run), (sum(part.size for part in run) + more,), more, groups)
            for run, more in zip(runs, paddings, strict=True)
        ]

    def _parts(self, start: int, stop: int) -> Iterator[Part]:
        begin = 0
        for name, shape in self.shapes.items():
            end = begin + math.prod(shape)
            if max(start, begin) < min(stop, end):
                yield Part(name, shape, max(start, begin) - begin, min(stop, end) - begin)
            begin = end


def buckets(shapes: Mapping[str, Shape], ranks: int, itemsize: int, most_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Divide tensors of these shapes, in the order of the model, into buckets for `ranks` ranks.

    In a bucket, those that weight decay may spare are together.
    """
    groups: list[dict[str, Shape]] = []
    room = 0
    for name, shape in reversed(list(shapes.items())):
        size = math.prod(shape) * itemsize
        if not groups or size > room:
            groups.append({})
            room = most_bytes
        groups[-1][name] = shape
        room -= size
    return [bucket(group, ranks) for group in groups]


def bucket(shapes: Mapping[str, Shape], ranks: int) -> Bucket:
    """A bucket of tensors of these shapes: matrices and kernels before vectors."""
    return Bucket(dict(sorted(shapes.items(), key=lambda item: len(item[1]) < 2)), ranks)
