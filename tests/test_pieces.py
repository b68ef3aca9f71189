"""Pieces of tensors: slices along axes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from hvdkit.core.group import Group
from hvdkit.core.pieces import joined, whole
from hvdkit.core.slices import sliced, turned
from hvdkit.core.state import from_canonical
from hvdkit.errors import RequestError
from hvdkit.tasks.parts import Cut
from tests import numpy_adapter


@pytest.mark.parametrize("cut", [Cut(0), Cut(1), Cut(2), Cut(0, 2), Cut(1, 3), Cut(0, equal=False), Cut(1, 3, False)])
@pytest.mark.parametrize("ranks", [2, 3])
def test_slices_of_all_ranks_are_the_whole(cut: Cut, ranks: int) -> None:
    length = ranks if cut.equal else 2 * ranks - 1  # of each block: parts of 1, or one of 1 and others of 2
    shape = tuple(cut.blocks * length if axis == cut.axis else 4 for axis in range(3))
    array = np.arange(float(math.prod(shape))).reshape(shape)
    groups = [Group(tuple(range(3, 3 + ranks)), index) for index in range(ranks)]
    pieces = [sliced("a", shape, cut, group) for group in groups]
    found = [piece.of({"a": array}) for piece in pieces]
    ops: Any = numpy_adapter.NumpyAdapter()
    everyone = np.concatenate([part.reshape(-1) for part in found])
    assert all(np.array_equal(joined(ops, everyone, piece, groups[0]), array) for piece in pieces)
    assert [piece.local_shape for piece in pieces] == [part.shape for part in found]
    assert [sum(part.size for part in piece.parts) for piece in pieces] == [part.size for part in found]
    own = [block.take([0], cut.axis) for block in np.split(array, cut.blocks, cut.axis)]
    assert np.array_equal(found[0], np.concatenate(own, cut.axis)), "the first of each block"


@pytest.mark.parametrize(("shape", "axis"), [((4, 6, 3, 2), 0), ((4, 6, 3, 2), 1), ((4, 6), 1), ((4,), 0)])
def test_a_slice_is_turned_as_the_framework_turns_the_whole(shape: tuple[int, ...], axis: int) -> None:
    """OIHW kernels to HWIO, for example: the joined slices of all ranks are the whole."""
    array = np.arange(float(math.prod(shape))).reshape(shape)
    groups = [Group((0, 1), index) for index in range(2)]
    pieces = [sliced("a", shape, Cut(axis), group) for group in groups]
    own = [turned(piece).of({"a": from_canonical(array)}) for piece in pieces]
    for piece, got in zip(pieces, own, strict=True):
        assert np.array_equal(got, from_canonical(piece.of({"a": array})))
    everyone, ops = np.concatenate([part.reshape(-1) for part in own]), numpy_adapter.NumpyAdapter()
    assert np.array_equal(joined(ops, everyone, turned(pieces[0]), groups[0]), from_canonical(array))


@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_a_whole_tensor_is_one_piece(shape: tuple[int, ...]) -> None:
    array = np.ones(shape)
    piece = whole("a", shape)
    assert (
        np.array_equal(piece.of({"a": array}), array)
        and piece.parts[0].size == array.size
        and piece.local_shape == shape
    )


@pytest.mark.parametrize(
    ("cut", "wanted"),
    [(Cut(1), "a multiple of 2"), (Cut(1, 3), "a multiple of 6"), (Cut(1, equal=False), "at least 4")],
)
def test_what_cannot_be_divided_equally_is_refused(cut: Cut, wanted: str) -> None:
    group = Group((0, 1) if cut.equal else (0, 1, 2, 3), 0)
    with pytest.raises(RequestError, match=rf"a: expected {wanted} along axis 1, got the shape \(4, 3\)"):
        sliced("a", (4, 3), cut, group)
