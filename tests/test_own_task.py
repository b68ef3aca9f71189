"""Tasks of the user's own: a script with a model, data, a loss and metrics, under hvdkit's commands."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, Hvdkit

from hvdkit import adapters, tasks
from hvdkit.checkpoint import snapshots
from hvdkit.core import tuning
from hvdkit.core.heartbeat import Heartbeat
from hvdkit.data.batches import ArraySplit
from hvdkit.errors import RequestError
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.tasks.own import Own
from hvdkit.tasks.task import Metrics
from hvdkit.worker import evaluate, setup, train

REGRESSION = ROOT / "examples" / "regression.yaml"
DOCUMENT = {
    "name": "own",
    "model": {"name": "own", "script": "own.py", "options": {"shift": 2}},
    "data": {"name": "own"},
    "batch_size": 8,
    "epochs": 3,
    "optimizer": {"name": "adamw", "learning_rate": 0.1},
}


def wrong(outputs: np.ndarray, targets: np.ndarray) -> tuple[float]:
    return (float((outputs.argmax(axis=1) != targets).sum()),)


class Sides(Own):
    """On which side of a line a point is."""

    unit, metrics, best = "points", Metrics(("wrong",), wrong), "-wrong"

    def samples(self) -> tuple[ArraySplit, ArraySplit]:
        points = np.random.default_rng(self.recipe.seed).standard_normal((120, 2))
        labels = (points[:, 0] + self.options["shift"] * points[:, 1] > 0).astype(np.int64)
        return ArraySplit(points[40:], labels[40:]), ArraySplit(points[:40], labels[:40])

    def model(self) -> Any:
        return adapters.load("local").Linear(2, 2)  # type: ignore[attr-defined]


@pytest.mark.check
def test_a_task_of_ones_own_trains_and_is_evaluated_by_its_metrics(tmp_path: Path) -> None:
    adapter: Any = adapters.load("local")
    recipe, script = Recipe.model_validate(DOCUMENT), setup.Script(Sides.build, Sides)
    (tmp_path / "run").mkdir()
    result = train.train(adapter, script, recipe, tmp_path / "run", Heartbeat())
    assert (result.model, result.parameters, result.steps, result.val_accuracy) == ("own", 6, 30, None)
    assert result.validation and 0 <= result.validation["wrong"] < 0.2
    ends = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    errors = {line["step"]: line["validation"]["wrong"] for line in ends if line["ends_epoch"]}
    best = snapshots.read(tmp_path / "run" / "checkpoints" / "best").record.progress
    assert errors[best.step] == min(errors.values()), "the best has the lowest, not the highest"
    evaluate.evaluate(adapter, script, recipe, tmp_path / "run" / "checkpoints" / "last", tmp_path, Heartbeat())
    found = json.loads((tmp_path / "evaluate.json").read_text())
    assert found["metrics"] == {"wrong": errors[30]} and (found["accuracy"], found["total"]) == (None, 40)
    again = train.train(adapter, script, recipe.model_copy(update={"epochs": 4}), tmp_path / "run", Heartbeat(), True)
    assert (again.first_step, again.steps) == (30, 40)


@pytest.mark.check
def test_nothing_is_claimed_of_a_network_that_only_the_script_knows() -> None:
    recipe = Recipe.model_validate(DOCUMENT)
    chosen = tuning.choose(recipe, {})
    assert "only the script knows" in chosen[tuning.FUSION].why and "only the script knows" in chosen[tuning.CACHE].why
    assert tasks.choose(recipe).architecture().parameter_shapes() == {}


@pytest.mark.check
def test_own_data_needs_a_script_of_ones_own() -> None:
    with pytest.raises(RequestError, match=r"data\.name: own needs a script; expected model\.name own, got resnet20"):
        schema.load(ROOT / "recipes" / "resnet20-digits.yaml", ["data={name: own}"])
    with pytest.raises(RequestError, match=r"model\.name: expected own for a script of your own, got resnet20"):
        Sides(schema.load(ROOT / "recipes" / "resnet20-digits.yaml"))


@pytest.mark.check
def test_a_script_that_is_not_there_and_a_parity_that_cannot_be(hvdkit: Hvdkit) -> None:
    done = hvdkit("train", REGRESSION, "--framework", "pytorch", "model.script=nowhere.py")
    assert done.returncode == 2
    assert "model.script: nowhere.py: no such file; expected a Python script" in done.stderr
    done = hvdkit("parity", REGRESSION, "--framework", "pytorch")
    assert done.returncode == 2 and "model own: parity needs the same model under every framework" in done.stderr


def test_the_regression_learns_on_two_ranks_is_resumed_and_evaluated(hvdkit: Hvdkit, tmp_path: Path) -> None:
    words = ("train", REGRESSION, "--framework", "pytorch", "-np", 2, "--out", "run", "checkpoint={keep: 9}")
    words = (*words, f"model.script={ROOT / 'examples' / 'regression_pytorch.py'}", "threads=1", "check_ranks=5")
    done = hvdkit(*words, "epochs=6", "accumulate=2", "compression=fp16")
    assert done.returncode == 0, done.stderr
    done = hvdkit(*words, "epochs=12", "accumulate=2", "compression=fp16", "--resume")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    errors = [line["validation"]["absolute_error"] for line in lines if line["ends_epoch"]]
    assert len(errors) == 12 and min(errors) < 0.8 * errors[0]
    done = hvdkit("evaluate", tmp_path / "run" / "checkpoints" / "best", "--framework", "pytorch", "--out", "found")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found" / "evaluate.json").read_text())
    assert found["metrics"]["absolute_error"] == pytest.approx(min(errors), rel=1e-5)
    assert f"absolute_error {min(errors):.4}"[:20] in done.stdout
