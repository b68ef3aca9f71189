"""Checkpoints of sharded runs, whose tensors are written as they come: the same files, and never all in memory."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.streamed import SafetensorsFile
from hvdkit.checkpoint.writing import Checkpoints
from hvdkit.core.group import Topology
from hvdkit.recipe.schema import AdamW, Checkpointing
from tests.crowd import together
from tests.sharing import batch, session_of, staged
from tests.test_checkpoint import STATE, record

DTYPES = ["float64", "float32", "float16", "complex64", "bool"]
DTYPES += [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
ARRAYS = st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3).map(tuple))


@given(layout=st.dictionaries(st.text(max_size=5), ARRAYS, max_size=6), order=st.randoms(use_true_random=False))
def test_the_library_reads_what_is_written_in_any_order(
    tmp_path_factory: pytest.TempPathFactory, layout: dict[str, tuple[str, tuple[int, ...]]], order: Any
) -> None:
    path, random = tmp_path_factory.mktemp("file") / "model.safetensors", np.random.default_rng(0)
    arrays = {name: np.asarray(random.integers(0, 2, shape)).astype(dtype) for name, (dtype, shape) in layout.items()}
    with path.open("wb") as opened:
        file = SafetensorsFile(opened, layout)
        for name in order.sample(sorted(layout), len(layout)):
            file.put(name, arrays[name])
    assert path.read_bytes() == save(arrays), "the bytes that the library writes"
    found = load(path.read_bytes())
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype and np.array_equal(found[name], array)


@pytest.mark.parametrize("stage", ["optimizer", "gradients", "parameters"])
def test_shares_are_written_as_a_whole_state_is(tmp_path: Path, stage: str) -> None:
    def train(adapter: Any, topology: Topology) -> None:
        session = session_of(adapter, AdamW(learning_rate=0.1), staged(adapter, topology, stage))
        session.train_step([batch(0, topology.rank)])
        whole, arrays = session.state(), session.state_arrays(keep=topology.is_root)
        if not topology.is_root:
            assert not list(arrays)
            return
        layout = session.state_layout()
        assert layout == {name: (str(array.dtype), array.shape) for name, array in whole.items()}
        for number, checkpoints in enumerate(Checkpoints(tmp_path / str(n), Checkpointing(), "accuracy") for n in "01"):
            if number:
                checkpoints.write_each(record(1), layout, arrays)
            else:
                checkpoints.write(record(1), layout, whole.items())
            checkpoints.wait()

    together(3, train)
    first, second = (snapshots.read(tmp_path / number / "last") for number in "01")
    assert first.state.keys() == second.state.keys() and "optimizer.step" in first.state
    assert all(np.array_equal(second.state[name], array) for name, array in first.state.items())


def test_a_full_disk_leaves_no_rank_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []

    def tensors() -> Iterator[tuple[str, np.ndarray]]:
        for name, array in STATE.items():
            taken.append(name)
            yield name, array

    checkpoints = Checkpoints(tmp_path, Checkpointing(), "accuracy")
    layout = {name: (str(array.dtype), array.shape) for name, array in STATE.items()}
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(SafetensorsFile, "put", mock.Mock(side_effect=full))
    checkpoints.write_each(record(1), layout, tensors())
    assert taken == list(STATE)
    checkpoints.wait()
    assert checkpoints.missing and "No space left on device" in checkpoints.missing
    assert not list(tmp_path.iterdir())
