"""A checkpoint of one framework, gone on from in each: in float64 the next step ends at the same state."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import FRAMEWORKS, Hvdkit

from hvdkit.core import checkpoint

SETTINGS = (
    "model.name=resnet8",
    "precision=fp64",
    "batch_size=16",
    "epochs=1",
    "checkpoint={every_steps: 1, keep: 9}",
    "data.augment=crop-flip",
)
OPTIMIZERS = {
    "sgd": "optimizer={name: sgd, learning_rate: 0.05, momentum: 0.9, weight_decay: 1.0e-2}",
    "adamw": "optimizer={name: adamw, learning_rate: 0.01, weight_decay: 1.0e-1}",
}
SLOTS = {"sgd": ("momentum",), "adamw": ("exp_avg", "exp_avg_sq")}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("writer", "optimizer"), (("pytorch", "sgd"), ("mxnet", "adamw")))
def test_the_next_step_is_the_same_in_every_framework(
    writer: str, optimizer: str, hvdkit: Hvdkit, recipe: Path, tmp_path: Path
) -> None:
    options = ("--out", "run", *SETTINGS, OPTIMIZERS[optimizer], "steps=4")
    done = hvdkit("train", recipe, "--framework", writer, *options)
    assert done.returncode == 0, done.stderr
    third, fourth = (tmp_path / "run" / "checkpoints" / f"step-0000000{step}" for step in (3, 4))
    before, reference = checkpoint.read(third), checkpoint.read(fourth).state
    assert before.record.framework == writer
    assert all(f"optimizer.{slot}.conv1.weight" in reference for slot in SLOTS[optimizer])
    moved = {name: error(before.state[name], value) for name, value in reference.items() if name != "optimizer.step"}
    assert min(moved[name] for name in moved if name.endswith("weight")) > 1e-6, "the step shows"
    for framework in set(FRAMEWORKS) - {writer}:
        shutil.rmtree(fourth)
        done = hvdkit("train", recipe, "--framework", framework, *options, "--resume")
        assert done.returncode == 0, done.stderr
        found = checkpoint.read(fourth)
        assert (found.record.framework, found.record.progress.step) == (framework, 4)
        assert found.state.keys() == reference.keys(), framework
        apart = {name: error(found.state[name], value) for name, value in reference.items()}
        worst = max(apart, key=lambda name: apart[name])
        print(f"{writer}, {optimizer}, then {framework}: {apart[worst]:.1e} in {worst}")
        assert apart[worst] <= 1e-9, f"{framework}: {apart[worst]:.1e} in {worst}"


def error(got: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(got - reference) / np.linalg.norm(reference))
