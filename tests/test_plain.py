"""The hand-written scripts that hvdkit is measured against: they run, are the same model, and know no hvdkit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from hvdkit.data.batches import ArraySplit, open_dataset
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.recipe.schema import Digits
from tests.conftest import FRAMEWORKS, ROOT, rest_thorough
from tests.launching import framework_job

pytestmark = pytest.mark.long

PLAIN = ROOT / "benchmarks" / "plain"


@pytest.mark.parametrize("framework", rest_thorough(*FRAMEWORKS))
def test_two_steps_on_two_ranks(framework: str, tmp_path: Path) -> None:
    out, script = tmp_path / "result.json", PLAIN / f"resnet_{framework}.py"
    LAUNCHERS["direct"].run(framework_job(framework, tmp_path, script, "--steps", 2, "--out", out))
    result = json.loads(out.read_text())
    assert result["parameters"] == 272_474
    assert result["steps"] == 2
    assert result["images_per_second"] > 0
    assert 0 <= result["val_accuracy"] <= 1


@pytest.mark.check
def test_plain_means_without_hvdkit() -> None:
    for path in PLAIN.glob("*.py"):
        assert not any("hvdkit" in line for line in path.read_text().splitlines() if "import" in line), path


@pytest.mark.check
def test_the_digits_are_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same pictures and as many of them held out; only the order differs."""
    monkeypatch.syspath_prepend(str(PLAIN))
    import shared

    dataset = open_dataset(Digits(name="digits"), 10, seed=1)
    assert isinstance(dataset.train, ArraySplit) and isinstance(dataset.val, ArraySplit)
    (images, labels), (val_images, val_labels) = shared.digits()
    assert images.shape == (1437, 32, 32, 3)
    assert val_images.shape == (360, 32, 32, 3)
    assert images.dtype == val_images.dtype == np.float32

    def sums(arrays: list[np.ndarray]) -> np.ndarray:
        return np.sort(np.concatenate([array.sum(axis=(1, 2, 3), dtype=np.float64) for array in arrays]))

    theirs, ours = sums([images, val_images]), sums([dataset.train.inputs, dataset.val.inputs])
    assert np.allclose(theirs, ours, rtol=0, atol=1e-2)
    assert np.array_equal(
        np.bincount(np.concatenate([labels, val_labels])),
        np.bincount(np.concatenate([dataset.train.targets, dataset.val.targets])),
    )
