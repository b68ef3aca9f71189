"""All ranks train the same model on the same samples, or training does not start."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdkit.checkpoint import snapshots
from tests.conftest import Hvdkit
from tests.own_tasks import DOCUMENT

pytestmark = pytest.mark.long

# A task whose ranks differ in what `options` name. It draws from each generator that hvdkit seeds.
SCRIPT = """
import os
import random

import numpy as np

from hvdkit.adapters import {framework} as adapter
from hvdkit.data.batches import ArraySplit
from hvdkit.tasks.own import Own
from hvdkit import run_task

{model}

TOP = np.random.permutation(60)  # before hvdkit starts
RANK, SIZE = (int(os.environ.get(f"HOROVOD_{{name}}", default)) for name, default in (("RANK", 0), ("SIZE", 1)))


class Seen(ArraySplit):
    def batch(self, indices):
        found = super().batch(indices)
        with open(f"seen-{{RANK}}.txt", "a") as file:
            file.write(" ".join(map(str, found.inputs[:, 0].astype(int))) + "\\n")
        return found


class Task(Own):
    def samples(self):
        kind = self.options["differs"] if RANK else ""
        order = np.random.permutation(TOP[random.sample(range(60), 60)])
        order = np.array([int(each) for each in set(map(str, order))])  # a set has no order of its own
        x = np.arange(60, dtype="float32")[order][:, None].repeat(4, 1)
        y = order % 2
        if kind == "seed":
            order = np.random.default_rng().permutation(60)
            x, y = x[order], y[order]
        if kind == "number":
            x, y = x[:50], y[:50]
        if kind == "value":
            x[41, 2] += 0.25
        if kind == "target":
            y[3] ^= 1
        held = slice(0, 12)
        train = ArraySplit(x[12:] / 60, y[12:])
        if self.options["differs"] == "share":
            mine = np.arange(RANK, 45, SIZE)
            train = Seen(mine[:, None].repeat(4, 1), mine % 2)
        return train, ArraySplit(x[held] / 60, y[held])

    def model(self):
        return model(self.options["differs"] if RANK else "")


if __name__ == "__main__":
    run_task(adapter, Task)
"""
MODELS = {
    "pytorch": """
import torch


class Net(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.drop = torch.nn.Linear(4, 2), torch.nn.Dropout(0.5)
        self.scale = 1.5 if kind == "attribute" else 1.0
        self.register_buffer("shift", torch.full((4,), 0.1 if kind == "buffer" else 0.0), persistent=False)
        if kind == "weights":
            self.layer.weight.data += float(os.urandom(1)[0] + 1)

    def forward(self, x):
        if self.training:
            with open(f"drawn-{RANK}.txt", "a") as file:
                file.write(f"{np.random.random()} {random.random()} {torch.rand(1).item()}\\n")
        return self.layer(self.drop(x + self.shift)) * self.scale


model = Net
""",
    "keras": """
import keras


def model(kind):
    layers = keras.layers
    return keras.Sequential([layers.Input((4,)), layers.Dropout(0.5), layers.Dense(2)])
""",
    "tensorflow": """
import tensorflow as tf


class Net(tf.Module):
    def __init__(self):
        super().__init__()
        self.kernel = tf.Variable(tf.random.normal((4, 2)), name="kernel")
        self.bias = tf.Variable([0.1 * random.random(), 0.1 * np.random.random()], name="bias")

    def __call__(self, x, training):
        return (tf.nn.dropout(x, 0.5) if training else x) @ self.kernel + self.bias


def model(kind):
    return Net()
""",
    "mxnet": """
from mxnet import gluon


def model(kind):
    layers = gluon.nn.HybridSequential()
    layers.add(gluon.nn.Dropout(0.5), gluon.nn.Dense(2, in_units=4))
    return layers
""",
}


def written(place: Path, framework: str, differs: str = "nothing", **keys: object) -> None:
    """The script and its recipe, as own.py and own.yaml."""
    (place / "own.py").write_text(SCRIPT.format(framework=framework, model=MODELS[framework]))
    model = {"name": "own", "script": "own.py", "options": {"differs": differs}}
    document = DOCUMENT | {"model": model, "batch_size": 6, "epochs": 2, "threads": 1} | keys
    (place / "own.yaml").write_text(json.dumps(document))


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("differs", "told"),
    [
        pytest.param("seed", "samples: expected the same samples on all ranks", marks=pytest.mark.thorough),
        ("number", "samples: expected as many training samples on all ranks, got 48 on rank 0 and 38 on rank 1; give"),
        ("value", "got other inputs of the 48 training samples on rank 1 than on rank 0; give all ranks the whole"),
        pytest.param("target", "got other targets of the 12 validation samples on rank 1", marks=pytest.mark.thorough),
        pytest.param("share", "got 23 on rank 0 and 22 on rank 1; give all ranks th", marks=pytest.mark.thorough),
        ("weights", "expected the same weights on all ranks, got others on rank 1 than on rank 0, first in layer."),
        ("buffer", "model: expected the same buffers on all ranks, got another shift on rank 1 than on rank 0; draw"),
        ("attribute", "model: expected the same outputs on all ranks for the same samples and weights, got others"),
    ],
)
def test_ranks_that_differ_do_not_train(differs: str, told: str, hvdkit: Hvdkit, tmp_path: Path) -> None:
    written(tmp_path, "pytorch", differs)
    done = hvdkit("train", "own.yaml", "-np", 2, "--out", "run")
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "run").exists(), "a refused request leaves nothing"


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("framework", "np"),
    [
        ("pytorch", 3),
        pytest.param("keras", 1, marks=pytest.mark.thorough),
        pytest.param("tensorflow", 3, marks=pytest.mark.thorough),
        pytest.param("mxnet", 1, marks=pytest.mark.thorough),
    ],
)
def test_ranks_draw_the_same_until_they_train(framework: str, np: int, hvdkit: Hvdkit, tmp_path: Path) -> None:
    """At the script's top, in `samples` and in `model`; an evaluation, on other ranks, draws the same too."""
    written(tmp_path, framework)
    done = hvdkit("train", "own.yaml", "-np", 2, "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    if framework == "pytorch":
        drawn = [(tmp_path / f"drawn-{rank}.txt").read_text().splitlines()[-8:] for rank in (0, 1)]
        both = zip(*([line.split() for line in lines] for lines in drawn), strict=True)
        assert all(mine != other for one, two in both for mine, other in zip(one, two, strict=True))
    best = snapshots.read(tmp_path / "run" / "checkpoints" / "last").record
    done = hvdkit("evaluate", "run/checkpoints/last", "-np", np, "--out", "found", "--framework", framework)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found" / "evaluate.json").read_text())
    assert found["metrics"] == best.progress.validation, "the same bits on any number of ranks"


@pytest.mark.usefixtures("warm")
def test_a_share_a_rank_is_trained_on_and_resumed_on_as_many_ranks(hvdkit: Hvdkit, tmp_path: Path) -> None:
    written(tmp_path, "pytorch", "share", data={"name": "own", "shares": True}, checkpoint={"keep": 9})
    done = hvdkit("train", "own.yaml", "-np", 2, "--out", "run")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in (0, 1):
        batches = [[int(x) for x in line.split()] for line in (tmp_path / f"seen-{rank}.txt").read_text().splitlines()]
        epochs = [[x for batch in batches[first:][:3] for x in batch] for first in (-6, -3)]
        assert all(len(set(each)) == 18 and {x % 2 for x in each} == {rank} for each in epochs), batches
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["steps"], result["val_samples"]) == (6, 12)
    done = hvdkit("train", "own.yaml", "-np", 1, "--out", "run", "--resume", "epochs=3")
    told = "-np: expected 2 ranks, as each of the checkpoint's has trained on a share of its own (data.shares), got 1"
    assert done.returncode == 2 and told in done.stderr, done.stderr
    done = hvdkit("train", "own.yaml", "-np", 2, "--out", "run", "--resume", "epochs=3")
    assert done.returncode == 0, done.stderr
    resumed = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (resumed["first_step"], resumed["steps"]) == (6, 9)
