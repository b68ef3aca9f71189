"""A pipeline of a user's own model: a PyTorch module whose `blocks` say what it is a chain of."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.results.parity import Parity
from tests.conftest import Hvdkit
from tests.divided import LARGEST_ERROR, SETTINGS, continues

SCRIPT = """
import numpy as np
import torch
from torch import nn
import hvdkit

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)
        )
        self.register_buffer("scale", torch.ones(3))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        x = self.stem(x)
        for block in self.body:
            x = block(x)
        return self.head(pooled(x))

    def blocks(self):
        return [self.stem, *self.body, pooled, self.head]

def pooled(x):
    return x.mean((2, 3))

class Task(hvdkit.Own):
    def samples(self):
        images = np.random.default_rng(1).standard_normal((80, 6, 6, 3))
        labels = (images.mean((1, 2, 3)) > 0).astype("int64")
        return hvdkit.ArraySplit(images[16:], labels[16:]), hvdkit.ArraySplit(images[:16], labels[:16])

    def model(self):
        return Net()

    def loss(self, outputs, targets):
        return nn.functional.cross_entropy(outputs, targets)

if __name__ == "__main__":
    hvdkit.run_task("pytorch", Task)
"""
BUFFER = '        self.register_buffer("scale", torch.ones(3))\n'
COUNTED = SCRIPT.replace(
    "return nn.functional.cross_entropy(outputs, targets)",
    'return nn.functional.cross_entropy(outputs, targets, reduction="sum"), len(targets)',
).replace(BUFFER, "")
RECIPE = """
name: chain
model: {name: own, script: chain.py}
data: {name: own}
batch_size: 8
epochs: 2
optimizer: {name: sgd, learning_rate: 0.1, momentum: 0.9}
schedule: {scale: none}
"""
STAGES = ("-np", 2, "parallel.pipeline=2", "parallel.microbatches=2")


def written(folder: Path, script: str = SCRIPT.replace(BUFFER, "")) -> str:
    (folder / "chain.py").write_text(script)
    (folder / "chain.yaml").write_text(RECIPE)
    return "chain.yaml"


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("schedule", ("1f1b", pytest.param("interleaved", marks=pytest.mark.thorough)))
def test_a_run_continues_in_other_stages(schedule: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    """As alone with the same microbatches, which its batch norms see; the loss is a sum, with a count."""
    stages = (*STAGES, f"parallel.schedule={schedule}", f"parallel.chunks={1 + (schedule == 'interleaved')}")
    run, alone = ("train", written(tmp_path, COUNTED), *SETTINGS), ("batch_size=4", "accumulate=2")
    results = continues(hvdkit, "pytorch", stages, tmp_path, run, alone)
    for key in ("val_loss", "val_accuracy", "train_loss"):
        assert results[0][key] == pytest.approx(results[1][key], rel=1e-10)


SKEWED = """
def skewed(x):
    return 1.001 * x if torch.is_grad_enabled() else x
"""


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("skewed", (False, True))
def test_parity_holds_its_stages_to_one_process(skewed: bool, hvdkit: Hvdkit, tmp_path: Path) -> None:
    """With blocks that compute in training what the model does not, it fails, and names what deviates first."""
    script = SCRIPT.replace(BUFFER, "")
    if skewed:
        script = script.replace("pooled, self.head]", "pooled, skewed, self.head]").replace(
            "class Task", f"{SKEWED}\nclass Task"
        )
    done = hvdkit("parity", written(tmp_path, script), *STAGES, "--steps", 2, "--out", "run", "threads=1", timeout=150)
    assert done.returncode == int(skewed), done.stdout + done.stderr
    result = Parity.model_validate_json((tmp_path / "run" / "parity.json").read_text())
    stages = result.frameworks["pytorch"]
    assert stages.passed is not skewed
    if skewed:
        assert stages.first_deviation == "loss" and stages.likely_cause == "the loss function", stages
    else:
        assert stages.worst_gradient and stages.step_f64 < LARGEST_ERROR and result.np == 2


REFUSED = {
    "no blocks": (
        SCRIPT.replace("def blocks(self)", "def parts(self)"),
        "parallel.pipeline: Net.blocks: expected a method that returns the list of the model's parts, in the order in "
        "which its forward pass calls them, got none",
    ),
    "a tensor of no block": (
        SCRIPT,
        "parallel.pipeline: Net.blocks: expected scale in one of the 6 blocks, got none",
    ),
    "another order": (
        SCRIPT.replace(BUFFER, "").replace("[self.stem, *self.body,", "[self.stem, *list(self.body)[::-1],"),
        "parallel.pipeline: Net.blocks: expected blocks that compute the model's outputs one after the other",
    ),
    "what does not fit": (
        SCRIPT.replace(BUFFER, "").replace("pooled, self.head]", "self.head]"),
        "parallel.pipeline: Net.blocks: number 4, Linear, cannot take what the one before it returns: RuntimeError",
    ),
}


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("fault", REFUSED)
def test_what_is_no_chain_is_refused_in_a_line(fault: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    script, told = REFUSED[fault]
    done = hvdkit("train", written(tmp_path, script), *STAGES, "--out", "run", "threads=1")
    assert done.returncode == 2 and told in done.stderr.splitlines()[-1], done.stderr
    assert not (tmp_path / "run").exists()
