"""A model's tensors as pieces: what of them a rank has, and how ranks put them together again.

Every tensor of a state (parameters, the optimizer's slots, averages, buffers) is stored in pieces. A `Partition` says
which: whole tensors, slices along an axis (tensor parallelism), or, with sharding, flat parts of buckets
(`core/buckets.py`). Reading, loading, sizes and norms are written once, over pieces.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    from hvdkit.core.group import Group
    from hvdkit.core.seam import Adapter
    from hvdkit.core.tensors import Tensor, Tensors

BUCKET_BYTES = 25 * 2**20  # as in DistributedDataParallel (Li et al. 2020)
PIECE_BYTES = 2**20  # with `order: priority`; smaller pieces pay more latency, larger ones let others wait longer
ROOT_BLOCK = ""  # the block of parameters that belong to no other, which are used from the beginning to the end
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Elements `start` to `stop` of the tensor `name` of the model, whose whole `shape` this is: indices along an
    `axis`, or of the flattened tensor."""

    name: str
    shape: Shape
    start: int
    stop: int
    axis: int | None = None

    @property
    def size(self) -> int:
        """The number of elements."""
        count = self.stop - self.start
        return count if self.axis is None else count * math.prod(self.shape) // self.shape[self.axis]

    def of(self, array: np.ndarray) -> np.ndarray:
        """These elements of the whole tensor."""
        if self.axis is None:
            return array.reshape(-1)[self.start : self.stop]
        return array[(*(slice(None),) * self.axis, slice(self.start, self.stop))]


@dataclass(frozen=True)
class Piece:
    """What one tensor of shape `local_shape` has of the model: `parts`, one after the other, then `padding` zeros.

    Parts along an axis are of one tensor, equally long, and one after the other along that axis.

    Ranks of each of `groups` have the other pieces of these tensors. All parts' tensors are alike in what decides on
    weight decay, which is the `whole_shape` of the first.
    """

    parts: tuple[Part, ...]
    local_shape: Shape
    padding: int = 0
    groups: tuple[Group, ...] = ()

    @property
    def name(self) -> str:
        """The name of the first part's tensor."""
        return self.parts[0].name

    @property
    def whole_shape(self) -> Shape:
        """The shape of the first part's whole tensor."""
        return self.parts[0].shape

    def of(self, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
        """This piece of whole arrays by name."""
        import numpy as np  # the command line computes with sizes of buckets alone

        arrays_of_parts, axis = [part.of(arrays[part.name]) for part in self.parts], self.parts[0].axis
        if self.padding:
            arrays_of_parts.append(np.zeros(self.padding, arrays_of_parts[0].dtype))
        return (np.concatenate(arrays_of_parts, axis or 0) if len(arrays_of_parts) > 1 else arrays_of_parts[0]).reshape(
            self.local_shape
        )

    def divided_over(self, group: Group) -> bool:
        """Whether ranks of this group have different pieces."""
        return any(len(set(group.ranks) & set(own.ranks)) > 1 for own in self.groups)


def whole(name: str, shape: Shape) -> Piece:
    """A whole tensor as one piece."""
    return Piece((Part(name, shape, 0, math.prod(shape)),), shape)


def shape_of(tensor: Tensor) -> Shape:
    """The shape of a framework's tensor."""
    return tuple(int(size) for size in tensor.shape)


class Partition:
    """What this rank has of a model's tensors, such as its `parameters`: `pieces`, each of which is one tensor here.

    `pieces` are by their own names; without any given, each tensor is a piece of its name. Those of one tensor each,
    whole or `sliced`, are what this class puts together; a subclass divides otherwise. `shapes` and `dtypes` are of the
    whole tensors. The optimizer's slots are divided alike. Names of collectives begin with `label`.
    """

    by_kernel = True  # whether a kernel of the framework may update the pieces
    shared: Sequence[str] = ()  # parameters that other stages of a pipeline have too

    def __init__(
        self,
        adapter: Adapter,
        parameters: Mapping[str, Tensor],
        pieces: Mapping[str, Piece] | None = None,
        label: str = "pieces",
    ) -> None:
        self.adapter, self.parameters, self._label = adapter, parameters, label
        wholes = {name: whole(name, shape_of(tensor)) for name, tensor in parameters.items()}
        self.pieces: Mapping[str, Piece] = wholes | dict(pieces or {})
        self.shapes = {name: self.pieces[name].whole_shape for name in parameters}
        self.dtypes = {name: adapter.dtype(tensor) for name, tensor in parameters.items()}

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups whose ranks have different pieces of the same tensor; none if each rank has whole tensors."""
        groups = (group for piece in self.pieces.values() for group in piece.groups)
        return tuple({group.ranks: group for group in groups}.values())

    @property
    def stored(self) -> StateEntry:
        """The parameters as this rank keeps them between two steps."""
        return StateEntry(self, self.parameters)

    def counted(self, name: str) -> tuple[object, ...]:
        """What tensors have in common whose squares are added up over the same ranks."""
        return tuple(group.ranks for group in self.pieces[name].groups)

    def local(self, arrays: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        """What the pieces are parts of, by name, from whole arrays."""
        return arrays

    def variables(self) -> dict[str, Tensor]:
        """A variable of zeros for each piece."""
        weights = zip(self.pieces, self.weights(), strict=True)
        return {name: self.adapter.variable(weight) for name, weight in weights}

    def weights(self) -> list[Tensor]:
        """The weights of each piece."""
        return list(self.parameters.values())

    def store(self, weights: Iterable[Tensor]) -> None:
        """Set this rank's pieces to new weights, taken one by one; get the other ranks' where needed; collective."""
        for old, new in zip(self.weights(), weights, strict=True):
            self.adapter.assign(old, new)
        self.distribute([])

    def distribute(self, weights: list[Tensor]) -> None:
        """After a kernel: give other ranks these weights, set in place or returned, if they need them; collective."""

    def gather(self, tensors: Mapping[str, Tensor], names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """The whole tensors, by name, from tensors with the elements of all ranks' pieces; collective.

        They come in the order of `names`, or else in that which is fastest. No more than a bucket is in memory.
        """
        for first, run in groupby(self.shapes if names is None else names, self._together):
            tensors_by_name = self._gathered(first, tensors)
            for name in run:
                yield name, tensors_by_name[name]
            del tensors_by_name  # before the next is gathered

    def _together(self, name: str) -> str:
        """What tensors have in common that are gathered together, such as a bucket's number."""
        return name

    def _gathered(self, key: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The whole tensors that have `key` in common."""
        piece, tensor, ops = self.pieces[key], tensors[key], self.adapter
        for group in piece.groups:
            vector = self.adapter.allgather(ops.reshape(tensor, (-1,)), group, f"{self._label}.gather.{key}")
            tensor = joined(ops, vector, piece, group)
        return {key: tensor}

    def sum_of_squares(self, norms: list[Tensor]) -> Tensor:
        """The sum of squares over all elements of the whole tensors, from the norm of each piece; collective.

        All ranks of a group have their pieces in one order.
        """
        by_groups: dict[tuple[tuple[int, ...], ...], tuple[tuple[Group, ...], list[Tensor]]] = {}
        for piece, norm in zip(self.pieces.values(), norms, strict=True):
            by_groups.setdefault(tuple(group.ranks for group in piece.groups), (piece.groups, []))[1].append(norm)
        totals = []
        for groups, own in by_groups.values():
            total = sum_of_squares(self.adapter, own)
            for group in groups:
                total = self._summed(total, group)
            totals.append(total)
        return sum(totals[1:], totals[0])

    def _summed(self, numbers: Tensor, group: Group) -> Tensor:
        # An allgather has fewer messages one after the other than an allreduce.
        ops, shape = self.adapter, shape_of(numbers)
        gathered = self.adapter.allgather(ops.reshape(numbers, (-1,)), group, f"{self._label}.sum")
        return ops.reshape(sum(ops.part(gathered, [(math.prod(shape),)] * group.size)), shape)

    def norms(self, *kinds: list[Tensor]) -> list[list[Tensor]]:
        """For each list with a tensor for each piece, the norms over whole parameters; collective.

        No piece may have elements of several tensors.
        """
        ops = self.adapter
        owners = [piece.name for piece in self.pieces.values()]
        norms = [dict(zip(owners, map(ops.norm, tensors), strict=True)) for tensors in kinds]
        for group in self.groups:
            if not (names := self._partial(group)):
                continue
            own = [self._square(kind, name) for kind in norms for name in names]
            (totals,) = self.adapter.allreduce([ops.concat(own)], group, "sum", f"{self._label}.norms")
            sums = iter(ops.part(ops.sqrt(totals), [(1,)] * len(own)))
            norms = [kind | {name: next(sums) for name in names} for kind in norms]
        return [[kind[owner] for owner in owners] for kind in norms]

    def _partial(self, group: Group) -> Collection[str]:
        """The names of the tensors that are divided over a group, the same on all its ranks."""
        return [piece.name for piece in self.pieces.values() if group in piece.groups]

    def _square(self, norms: Mapping[str, Tensor], name: str) -> Tensor:
        norm = norms[name] if name in norms else self.zeros(1)
        return self.adapter.reshape(norm * norm, (1,))

    def zeros(self, size: int) -> Tensor:
        """A vector of zeros, in the first tensor's dtype."""
        import numpy as np

        return self.adapter.from_numpy(np.zeros(size, next(iter(self.dtypes.values()))))


@dataclass(frozen=True)
class StateEntry:
    """Tensors of a state that a `partition` divides, such as a slot of all parameters: this rank's `tensors`, by piece.

    Their names in the state begin with `prefix`.
    """

    partition: Partition
    tensors: Mapping[str, Tensor]
    prefix: str = ""

    @property
    def layout(self) -> dict[str, tuple[str, Shape]]:
        """The dtype and shape of each whole tensor, by its name in the state."""
        dtypes = self.partition.dtypes
        return {self.prefix + name: (dtypes[name], shape) for name, shape in self.partition.shapes.items()}

    def alike(self, group: Group) -> dict[str, Tensor]:
        """The tensors of which each rank of a group has the same piece, by their names in the state."""
        pieces = self.partition.pieces
        return {
            self.prefix + name: tensor for name, tensor in self.tensors.items() if not pieces[name].divided_over(group)
        }

    def gather(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """As `Partition.gather`, with the names in the state."""
        for name, tensor in self.partition.gather(self.tensors, names):
            yield self.prefix + name, tensor

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Set this rank's pieces of those whole arrays that are given, by their names in the state."""
        start = len(self.prefix)
        own = self.partition.local({n[start:]: array for n, array in arrays.items() if n.startswith(self.prefix)})
        for name, piece in self.partition.pieces.items():
            if all(part.name in own for part in piece.parts):
                set_from(self.partition.adapter, self.tensors[name], piece.of(own))


def joined(ops: Tensors, everyone: Tensor, piece: Piece, group: Group) -> Tensor:
    """The whole tensor from a vector with the elements of each rank's slice, of which `piece` is this rank's."""
    from hvdkit.tasks.parts import bounds  # most runs have whole tensors

    shape, blocks, axis = piece.whole_shape, len(piece.parts), piece.parts[0].axis or 0
    edges = [bounds(shape[axis] // blocks, index, group.size) for index in range(group.size)]
    slices = ops.part(everyone, [(*shape[:axis], blocks, stop - start, *shape[axis + 1 :]) for start, stop in edges])
    return ops.reshape(ops.concat(slices, axis + 1), shape)


def whole_tensors(adapter: Adapter, tensors: Mapping[str, Tensor]) -> StateEntry:
    """Tensors that each rank has whole."""
    return StateEntry(Partition(adapter, tensors), tensors)


def set_from(adapter: Adapter, tensor: Tensor, array: np.ndarray) -> None:
    """Set a tensor from an array of its dtype, or of one that holds its values."""
    value, dtype = adapter.from_numpy(array), adapter.dtype(tensor)
    adapter.assign(tensor, value if adapter.dtype(value) == dtype else adapter.cast(value, dtype))


def sum_of_squares(ops: Tensors, norms: list[Tensor]) -> Tensor:
    """The sum of squares over tensors with these norms."""
    norm = ops.norm(ops.join(norms))
    return norm * norm


def bytes_of(adapter: Adapter, tensors: Iterable[Tensor]) -> int:
    """The size of tensors."""
    import numpy as np

    return sum(math.prod(tensor.shape) * np.dtype(adapter.dtype(tensor)).itemsize for tensor in tensors)
