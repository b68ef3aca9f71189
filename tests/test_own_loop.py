"""Helpers for a loop of the user's own: `hvdkit.scaled`, `shard`, `mean` and `checkpoints`, in each framework."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hvdkit
from hvdkit.adapters.own_checkpoints import OwnCheckpoints
from tests.conftest import Hvdkit, rest_thorough

SCRIPT = Path(__file__).parent / "launched" / "own_loop.py"


@pytest.mark.parametrize("framework", rest_thorough("pytorch", "mxnet", "tensorflow", "keras"))
def test_a_loop_goes_on_from_its_checkpoint_with_the_same_bits(framework: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    words = ["-np", "2", "--framework", framework, "--out", str(tmp_path / "run"), str(SCRIPT), framework]
    done = hvdkit("launch", *words, str(tmp_path / "kept"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of 21 samples" in done.stdout and "rank 0 has of 0 and rank 1 of 1" in done.stdout
    files = [path.name for path in sorted((tmp_path / "kept" / "whole").iterdir())]
    assert files == ["checkpoint-000003.safetensors", "checkpoint-000004.safetensors"]


class Alone(SimpleNamespace):
    """Horovod of one process."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        super().__init__(is_initialized=lambda: True, rank=lambda: rank, size=lambda: size)

    def allgather_object(self, value: Any, name: str) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any, root_rank: int, name: str) -> Any:
        return value


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Alone:
    monkeypatch.setitem(sys.modules, "horovod.torch", Alone())
    return sys.modules["horovod.torch"]  # type: ignore[return-value]


class Part:
    """A part as PyTorch has them, whose state may be anything."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


class Variables:
    """A part as Keras has them."""

    def __init__(self, *values: float) -> None:
        self.variables = [Variable(value) for value in values]


class Variable:
    def __init__(self, value: float) -> None:
        self.value = np.array([value], np.float32)
        self.shape = self.value.shape

    def numpy(self) -> np.ndarray:
        return self.value

    def assign(self, value: np.ndarray) -> None:
        self.value = value


def kept(folder: Path, **parts: Any) -> OwnCheckpoints:
    return hvdkit.checkpoints(folder, **parts)


def test_values_of_a_loop_come_back_with_the_newest_checkpoint(alone: Alone, tmp_path: Path) -> None:
    first = Variables(1, 2)
    own = kept(tmp_path / "new" / "folder", keep=3, own=first)
    assert own.restore() == {}
    values = {"epoch": 3, "best": float("inf"), "history": [1.5, None, "text"], "pair": (1, {"by": {7: True}})}
    own.save(epoch=2)
    own.save(**values)
    second = Variables(0, 0)
    assert kept(tmp_path / "new" / "folder", own=second).restore() == values
    assert [float(variable.value[0]) for variable in second.variables] == [1, 2]


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda folder: hvdkit.shard(iter("abc")), "expected a tf.data.Dataset, or data with a length and indices"),
        (lambda folder: hvdkit.shard([]), "at least a sample for each of 1 ranks, got 0"),
        (lambda folder: hvdkit.mean({"loss": 1.0}, count=0), "more than 0 in all; got 0"),
        (lambda folder: hvdkit.mean({"loss": np.zeros(2)}), "loss: expected a number, or a tensor of one element"),
        (lambda folder: hvdkit.mean({"loss": 1.0}, count=-1), "counts of 0 or more"),
        (lambda folder: kept(folder, own=3), "own: expected a module, optimizer or scheduler of PyTorch"),
        (lambda folder: kept(folder, keep=0), "keep: expected 1 or more, got 0"),
        (lambda folder: kept(folder, own=Part({"a": [object()]})).save(), "own.a.0: expected tensors, numbers"),
        (
            lambda folder: kept(folder, own=Variables(1, 2, 3)).restore(),
            "own: expected 2 variables of the checkpoint's",
        ),
        (lambda folder: kept(folder, other=Variables(1, 2)).restore(), "expected the parts other, got own"),
        (
            lambda folder: kept(folder / "bad", own=Variables(1)).restore(),
            "expected a checkpoint of hvdkit.checkpoints",
        ),
    ],
)
def test_what_a_helper_cannot_do_is_refused(ask: Any, told: str, alone: Alone, tmp_path: Path) -> None:
    kept(tmp_path, own=Variables(1, 2)).save()
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "checkpoint-000001.safetensors").write_bytes(b"12345678 no safetensors")
    with pytest.raises(hvdkit.RequestError) as refused:
        ask(tmp_path)
    assert told in str(refused.value)
    assert len(list(tmp_path.iterdir())) == 2, "nothing is written"


def test_without_horovod_the_helpers_say_what_to_call() -> None:
    with pytest.raises(hvdkit.RequestError, match="initialized Horovod"):
        hvdkit.scaled(0.1)


def test_a_block_whose_shapes_are_not_known_yet_is_refused_by_its_parameter(alone: Alone, tmp_path: Path) -> None:
    parameters = {"0.bias": SimpleNamespace(shape=(4,)), "0.weight": SimpleNamespace(shape=(4, 0))}
    block = SimpleNamespace(collect_params=dict, _collect_params_with_prefix=lambda: parameters)
    with pytest.raises(hvdkit.RequestError, match=r"0\.weight: has no shape yet; call the block once on a batch"):
        kept(tmp_path, model=block).restore()
