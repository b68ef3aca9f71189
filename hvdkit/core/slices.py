"""Slices of tensors along an axis, which tensor parallelism makes: cut by a model's table."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hvdkit.core.pieces import Part, Piece, Shape, StateEntry, shape_of
from hvdkit.core.state import TURNED_BACK
from hvdkit.errors import RequestError
from hvdkit.tasks.parts import Cut, bounds
from hvdkit.tasks.task import state_shapes

if TYPE_CHECKING:
    from hvdkit.core.group import Group
    from hvdkit.tasks.task import Architecture


def sliced(name: str, shape: Shape, cut: Cut, group: Group) -> Piece:
    """This rank's slice of a tensor that is divided over the ranks of a group.

    Raises RequestError if it cannot be cut so.
    """
    axis, blocks, equal = cut
    ranks = group.size
    if shape[axis] < ranks or shape[axis] % (blocks * (ranks if equal else 1)):
        wanted = f"a multiple of {blocks * ranks}" if equal else f"at least {ranks}"
        raise RequestError(f"{name}: expected {wanted} along axis {axis}, got the shape {shape}")
    length = shape[axis] // blocks
    start, stop = bounds(length, group.index, ranks)
    parts = tuple(Part(name, shape, begin + start, begin + stop, axis) for begin in range(0, shape[axis], length))
    return Piece(parts, (*shape[:axis], blocks * (stop - start), *shape[axis + 1 :]), groups=(group,))


def pieces_of(table: Architecture, group: Group) -> dict[str, Piece]:
    """This rank's pieces of the parameters and running statistics that are divided over a tensor group; none over one
    rank.

    Raises RequestError if one cannot be cut as the table says.
    """
    if group.size == 1:
        return {}
    shapes = state_shapes(table)
    return {name: sliced(name, shapes[name], cut, group) for name, cut in table.cuts().items()}


def turned(piece: Piece) -> Piece:
    """A slice in the layout of a framework whose kernels are HWIO and matrices (in, out)."""
    order = TURNED_BACK.get(len(piece.local_shape), range(len(piece.local_shape)))
    shape, local = (tuple(sizes[axis] for axis in order) for sizes in (piece.whole_shape, piece.local_shape))
    parts = (replace(part, shape=shape, axis=order.index(part.axis or 0)) for part in piece.parts)
    return replace(piece, parts=tuple(parts), local_shape=local)


def check_pieces(*entries: StateEntry) -> None:
    """Raise RequestError unless each tensor has the shape of its piece."""
    for entry in entries:
        for name, piece in entry.partition.pieces.items():
            got = shape_of(entry.tensors[name]) if name in entry.tensors else "none"
            if got != piece.local_shape:
                raise RequestError(
                    f"model: {name}: expected this rank's part, of the shape {piece.local_shape}, got {got}"
                )
