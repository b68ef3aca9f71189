"""Losses that are (sum, count), end to end: it does not matter how samples are divided among ranks and batches.

What each strategy and framework computes with them is tried in tests/contract/counted.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hvdkit.checkpoint import snapshots
from hvdkit.core.state import parameters_of
from hvdkit.errors import RequestError
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.tasks.own import Own
from tests.conftest import ROOT, Hvdkit

pytestmark = pytest.mark.long

PADDED = {
    "name": "padded",
    "model": {"name": "own", "script": "net.py"},
    "data": {"name": "own"},
    "batch_size": 8,
    "steps": 3,
    "optimizer": {"name": "sgd", "learning_rate": 1.0, "clip_norm": 0.5},
    "schedule": {"scale": "none", "decay": "constant"},
    "precision": "fp64",
    "threads": 1,
}
SAMPLES = """
import numpy as np
from hvdkit.adapters import {framework}
from hvdkit.data.batches import ArraySplit
from hvdkit.tasks.own import Own
from hvdkit import run_task


class Padded(Own):
    def samples(self):
        made = np.random.default_rng(5)
        x = made.integers(0, 12, (40, 20))
        y = np.roll(x, -1, axis=1)
        for row, length in enumerate(made.choice(self.options.get("lengths", [1, 2, 20]), 40)):
            y[row, length:] = -100
        return ArraySplit(x[:24], y[:24]), ArraySplit(x[24:], y[24:])
"""
PYTORCH = """
    def model(self):
        import torch
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Embedding(12, 8), torch.nn.Linear(8, 12))

run_task(pytorch, Padded)
"""
KERAS = """
    def model(self):
        import keras
        keras.utils.set_random_seed(0)
        x = keras.Input((20,), dtype="int64")
        y = keras.layers.Embedding(12, 8, dtype=self.dtype)(x)
        return keras.Model(x, keras.layers.Dense(12, dtype=self.dtype, kernel_regularizer="l2", name="fc")(y))

    def loss(self, outputs, targets):
        import tensorflow as tf
        counts = targets != -100
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.where(counts, targets, 0), outputs)
        total, count = tf.reduce_sum(tf.where(counts, each, 0)), tf.math.count_nonzero(counts)
        return total / tf.cast(count, total.dtype) if self.options.get("mean") else (total, count)

run_task(keras, Padded)
"""


def trained(hvdkit: Hvdkit, out: Path, *words: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The weights, and the lines of metrics.jsonl."""
    done = hvdkit("train", *words, "--out", out)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return parameters_of(snapshots.read(out / "checkpoints" / "last").state), lines


def assert_same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    weights, lines = expected
    for name, value in found[0].items():
        assert abs(value - weights[name]).max() < 1e-12 * abs(weights[name]).max(), name
    assert found[1][-1]["loss"] == pytest.approx(lines[-1]["loss"], rel=1e-12)  # of all updates
    assert found[1][-1]["validation"] == pytest.approx(lines[-1]["validation"], rel=1e-12)


def written(folder: Path, framework: str, rest: str, **changes: Any) -> Path:
    (folder / "net.py").write_text(SAMPLES.format(framework=framework) + rest)
    (folder / "net.yaml").write_text(json.dumps(PADDED | changes))
    return folder / "net.yaml"


@pytest.mark.thorough
@pytest.mark.usefixtures("warm")
def test_fit_divides_sums_by_counts_and_leaves_a_models_own_losses_as_they_are(hvdkit: Hvdkit, tmp_path: Path) -> None:
    """One rank × 8, as pairs and as means, which are the same there, and two ranks × 2 × 2 batches."""
    recipe = written(tmp_path, "keras", KERAS)
    means = trained(hvdkit, tmp_path / "means", recipe, "model.options={mean: true}")
    one = trained(hvdkit, tmp_path / "one", recipe)
    two = trained(hvdkit, tmp_path / "two", recipe, "-np", 2, "batch_size=2", "accumulate=2")
    assert_same(two, one)
    assert means[1][-1]["validation"] != pytest.approx(one[1][-1]["validation"], rel=1e-6), "of two unequal batches"
    one[1][-1]["validation"] = means[1][-1]["validation"]
    assert_same(one, means)


@pytest.mark.usefixtures("warm")
def test_the_recipes_loss_ignores_a_label_of_ones_own_samples(hvdkit: Hvdkit, tmp_path: Path) -> None:
    recipe = written(tmp_path, "pytorch", PYTORCH, loss={"ignored_label": -100})
    one = trained(hvdkit, tmp_path / "one", recipe)
    two = trained(hvdkit, tmp_path / "two", recipe, "-np", 2, "batch_size=4", "sharding=gradients")
    assert_same(two, one)
    assert set(one[1][-1]["validation"]) == {"accuracy", "loss"}
    done = hvdkit("evaluate", tmp_path / "two" / "checkpoints" / "last", "-np", 2, "--out", "found", "batch_size=3")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found" / "evaluate.json").read_text())
    assert found["metrics"] == pytest.approx(one[1][-1]["validation"], rel=1e-12) and found["correct"] is None
    done = hvdkit("train", recipe, "--out", "refused", "loss={ignored_label: -1}")
    assert done.returncode == 2, done.stderr
    told = (
        "whole numbers of shape (n, …) from 0 to 11, or -1, loss.ignored_label, (the model has 12 outputs), got -100 to"
    )
    assert told in done.stderr and not (tmp_path / "refused").exists()


@pytest.mark.usefixtures("warm")
def test_a_gpt_ignores_a_token(hvdkit: Hvdkit, tmp_path: Path) -> None:
    size = "{name: gpt, layers: 1, heads: 2, width: 8, context: 16}"
    words = (ROOT / "recipes" / "gpt-tiny.yaml", f"model={size}", "precision=fp64", "steps=3", "threads=1")
    words = (*words, "--framework", "pytorch", "batch_size=8", "accumulate=1", "loss.ignored_label=32")
    one = trained(hvdkit, tmp_path / "one", *words)
    two = trained(hvdkit, tmp_path / "two", *words, "-np", 2, "batch_size=2", "accumulate=2")
    assert_same(two, one)
    assert set(one[1][-1]["validation"]) == {"loss", "perplexity"}, "bytes of ignored tokens are not counted"


@pytest.mark.usefixtures("warm")
def test_updates_without_a_target_are_left_out_and_said(hvdkit: Hvdkit, tmp_path: Path) -> None:
    recipe = written(tmp_path, "pytorch", PYTORCH, loss={"ignored_label": -100}, batch_size=1, steps=20)
    _, lines = trained(hvdkit, tmp_path / "some", recipe, "model.options={lengths: [0, 0, 20]}")
    told = [warning for line in lines for warning in line.get("warnings", [])]
    assert told and all("no target counts on any rank, so nothing is learned" in each for each in told)
    assert all(2 < line["loss"] < 3 for line in lines)
    done = hvdkit("train", recipe, "--out", "none", "model.options={lengths: [0]}")
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "loss: in step 1, 2, 3" in done.stderr and "expected a count above 0 in each update" in done.stderr


def test_keys_of_the_loss_that_cannot_be_right_are_refused() -> None:
    gpt = schema.load(ROOT / "recipes" / "gpt-tiny.yaml").model_dump()
    with pytest.raises(RequestError, match="expected none for a model of text, whose classes are tokens"):
        schema.revise(gpt | {"loss": {"class_weights": [1.0] * 256}}, "recipe")
    padded = Recipe.model_validate(PADDED | {"loss": {"ignored_label": 3}})
    with pytest.raises(RequestError, match="loss: expected none in the recipe, as Mine has a loss of its own"):
        type("Mine", (Own,), {"loss": lambda task, y, t: 0})(padded)
