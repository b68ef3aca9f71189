"""What of the model a rank updates: everything, or with sharding a share, in pieces (`strategies/sharded.py`).

Sharding divides the parameters into buckets of whole tensors, and each bucket into an equal share for each rank. A
bucket is its tensors' elements, one after the other, and zeros up to a multiple of the number of ranks. It has at most
BUCKET_BYTES, or one larger tensor. Buckets are in the order in which backward computes gradients: the last parameter
first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from hvdkit.core.tensors import Tensor

if TYPE_CHECKING:
    import numpy as np

    from hvdkit.core.seam import Adapter

BUCKET_BYTES = 25 * 2**20  # as in DistributedDataParallel (Li et al. 2020)
# Buckets under way, by stage. Horovod fuses those that are sent together, which costs copies; where they are sent one
# after the other in backward, fewer would make ranks wait for each other more often.
BUCKETS_AT_ONCE = {"optimizer": 1, "gradients": 4, "parameters": 2}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Fragment:
    """Elements `start` to `stop` of a flattened tensor."""

    name: str
    start: int
    stop: int

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Piece:
    """A part of a share that is updated as one vector: fragments, and `padding` zeros behind them.

    `shape` is that of a tensor it has elements of, which decides on weight decay.
    """

    fragments: tuple[Fragment, ...]
    padding: int
    shape: Shape

    @property
    def size(self) -> int:
        """The number of elements, with the padding."""
        return sum(fragment.size for fragment in self.fragments) + self.padding


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

    def pieces(self, rank: int, may_span: bool) -> list[Piece]:
        """A rank's share. With `may_span` a piece may span several tensors of the same number of dimensions: 0 or 1,
        or more. Otherwise each piece is of one tensor."""
        fragments = list(self._fragments(rank * self.share, (rank + 1) * self.share))
        padding = self.share - sum(fragment.size for fragment in fragments)
        if not fragments:
            return [Piece((), padding, ())]
        runs = [
            list(run) for _, run in groupby(fragments, lambda part: self._is_vector(part) if may_span else part.name)
        ]
        return [Piece(tuple(run), padding if run is runs[-1] else 0, self.shapes[run[0].name]) for run in runs]

    def _is_vector(self, fragment: Fragment) -> bool:
        return len(self.shapes[fragment.name]) < 2

    def _fragments(self, start: int, stop: int) -> Iterator[Fragment]:
        begin = 0
        for name, shape in self.shapes.items():
            end = begin + math.prod(shape)
            if max(start, begin) < min(stop, end):
                yield Fragment(name, max(start, begin) - begin, min(stop, end) - begin)
            begin = end


def buckets(shapes: Mapping[str, Shape], ranks: int, itemsize: int, most_bytes: int = BUCKET_BYTES) -> list[Bucket]:
    """Divide tensors of these shapes, in the order of the model, into buckets for `ranks` ranks.

    In a bucket, those that weight decay may spare are together.
    """
    found: list[dict[str, Shape]] = []
    room = 0
    for name, shape in reversed(list(shapes.items())):
        size = math.prod(shape) * itemsize
        if not found or size > room:
            found.append({})
            room = most_bytes
        found[-1][name] = shape
        room -= size
    return [bucket(each, ranks) for each in found]


def bucket(shapes: Mapping[str, Shape], ranks: int) -> Bucket:
    """A bucket of tensors of these shapes: matrices and kernels before vectors."""
    return Bucket(dict(sorted(shapes.items(), key=lambda item: len(item[1]) < 2)), ranks)


class Owned:
    """All parameters. A subclass divides them into pieces, each with a name, of which a rank has some.

    `shapes` has, for each piece, the shape of a parameter that it has elements of. The optimizer's slots are divided
    alike.
    """

    keeps_model = True  # whether this rank has all parameters between two steps
    in_place = True  # whether `weights` are the parameters themselves
    by_kernel = True  # whether a kernel of the framework may update them

    def __init__(self, adapter: Adapter, parameters: Mapping[str, Tensor]) -> None:
        self.adapter, self.parameters = adapter, parameters
        self.shapes = {name: tuple(int(size) for size in tensor.shape) for name, tensor in parameters.items()}

    @property
    def held(self) -> Mapping[str, Tensor]:
        """The tensors in which this rank keeps the parameters between two steps."""
        return self.parameters

    def model(self) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name and whole tensor, sorted by name; collective if ranks hold shares of them."""
        yield from sorted(self.parameters.items(), key=lambda item: item[0])

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set the parameters from arrays in their shapes and dtype."""
        for name, tensor in self.parameters.items():
            self.adapter.tensors.assign(tensor, self.adapter.from_numpy(arrays[name]))

    def variables(self) -> dict[str, Tensor]:
        """A variable of zeros for each piece."""
        return {name: self.adapter.tensors.variable(tensor) for name, tensor in self.parameters.items()}

    def weights(self) -> list[Tensor]:
        """The weights of each piece."""
        return list(self.parameters.values())

    def store(self, weights: Iterable[Tensor]) -> None:
        """Set the parameters to the new weights of all ranks' pieces; collective. Weights are taken one by one."""
        for parameter, weight in zip(self.parameters.values(), weights, strict=True):
            self.adapter.tensors.assign(parameter, weight)

    def stored_in_place(self, weights: list[Tensor]) -> None:
        """As `store`, of the new weights that a framework's kernel returns; collective."""

    def summed(self, number: Tensor) -> Tensor:
        """A number of one element over all pieces, from the sum over this rank's; collective."""
        return number

    def norms(self, *kinds: list[Tensor]) -> list[list[Tensor]]:
        """For each list with a tensor for each piece, the norms over the whole parameters; collective."""
        return [[self.adapter.tensors.norm(tensor) for tensor in tensors] for tensors in kinds]

    def whole(self, pieces: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Each parameter's name with a tensor in its shape, from all ranks' pieces; collective.

        Tensors come a bucket at a time, so that nobody has to hold all of them.
        """
        yield from pieces.items()

    def cut(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """This rank's pieces of arrays in the parameters' shapes."""
        return dict(arrays)
