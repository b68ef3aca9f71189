"""Pieces of tensors: slices along axes, and a tensor-parallel model over ranks that Horovod connects."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hvdkit.core.group import Group
from hvdkit.core.pieces import sliced, whole
from hvdkit.errors import RequestError
from hvdkit.launch.launchers import LAUNCHERS
from tests.conftest import ROOT
from tests.launching import framework_job


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_slices_of_all_ranks_are_the_whole(axis: int) -> None:
    array = np.arange(4 * 6 * 2.0).reshape(4, 6, 2)
    pieces = [sliced("a", array.shape, axis, Group((3, 5), index)) for index in range(2)]
    found = [piece.of({"a": array}) for piece in pieces]
    assert np.array_equal(np.concatenate(found, axis), array)
    assert [piece.local_shape for piece in pieces] == [part.shape for part in found]
    assert all(piece.parts[0].size == array.size / 2 and piece.whole_shape == array.shape for piece in pieces)


@pytest.mark.parametrize("shape", [(), (3,), (2, 0)])
def test_a_whole_tensor_is_one_piece(shape: tuple[int, ...]) -> None:
    array = np.ones(shape)
    piece = whole("a", shape)
    assert (
        np.array_equal(piece.of({"a": array}), array)
        and piece.parts[0].size == array.size
        and piece.local_shape == shape
    )


def test_what_cannot_be_divided_equally_is_refused() -> None:
    with pytest.raises(RequestError, match=r"a: expected a multiple of 2 along axis 1, got the shape \(4, 3\)"):
        sliced("a", (4, 3), 1, Group((0, 1), 0))


@pytest.mark.ranks
@pytest.mark.parametrize("np", [2, 4])
def test_a_tensor_parallel_model_trains_and_is_saved_as_the_whole_one(np: int, tmp_path: Path) -> None:
    """On a mesh of 1 × 2 and of 2 × 2 ranks: clipped, layerwise and averaged updates, states, files, overflows."""
    command = (ROOT / "tests" / "tensor_parallel_rank.py", tmp_path)
    LAUNCHERS["direct"].run(framework_job("pytorch", tmp_path / "logs", *command, np=np))
    ranks = json.loads((tmp_path / "report.json").read_text())
    assert len(ranks) == np
    parameters, divided = 8 * (8 * 12 + 8 + 10 * 8 + 10), 8 * (8 * 12 + 8 + 10 * 8) // 2 + 8 * 10
    for rank in ranks:
        for name, found in rank["trained"].items():
            assert found["far"] < 1e-12, (name, found)
            assert found["loaded"] and found["broadcast"] and found["files"] and found["digest"], (name, found)
            slots = 2 if name in ("adamw", "lamb") else 1
            assert found["bytes"] == [divided, slots * divided, parameters, slots * parameters]
        assert rank["overflow"]["changed"] == ["optimizer.loss_scale"]
