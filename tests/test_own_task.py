"""Tasks of the user's own: a script with a model, data, a loss and metrics, under hvdkit's commands."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdkit.checkpoint import snapshots
from hvdkit.commands import checked_run as plans
from hvdkit.commands import evaluate as evaluate_
from hvdkit.commands import loading, own_script
from hvdkit.commands import train as train_
from hvdkit.core.counting import Counting
from hvdkit.data.batches import ArraySplit
from hvdkit.errors import RequestError
from hvdkit.heartbeat import Heartbeat
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Recipe
from hvdkit.tasks.own import Own
from hvdkit.tasks.task import Metrics
from hvdkit.worker import inference, setup, train
from tests import local_adapter
from tests.conftest import ROOT, Hvdkit
from tests.local_adapter import Linear
from tests.own_tasks import DOCUMENT, nothing
from tests.resuming import rewrite_record

pytestmark = pytest.mark.long

REGRESSION = ROOT / "examples" / "regression.yaml"


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
        return Linear(2, 2)


@pytest.mark.check
def test_a_task_of_ones_own_trains_and_is_evaluated_by_its_metrics(tmp_path: Path) -> None:
    adapter: Any = local_adapter.adapter
    recipe, script = Recipe.model_validate(DOCUMENT), setup.RankScript(Sides.build, Sides)
    (tmp_path / "run").mkdir()
    result = train.train(adapter, script, recipe, tmp_path / "run", Heartbeat())
    assert (result.model, result.parameters, result.steps, result.val_accuracy) == ("own", 6, 30, None)
    assert result.validation and 0 <= result.validation["wrong"] < 0.2
    ends = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    errors = {line["step"]: line["validation"]["wrong"] for line in ends if line["ends_epoch"]}
    best = snapshots.read(tmp_path / "run" / "checkpoints" / "best").record.progress
    assert errors[best.step] == min(errors.values()), "the best has the lowest, not the highest"
    inference.evaluate(adapter, script, recipe, tmp_path / "run" / "checkpoints" / "last", tmp_path, Heartbeat())
    found = json.loads((tmp_path / "evaluate.json").read_text())
    assert found["metrics"] == {"wrong": errors[30]} and (found["accuracy"], found["total"]) == (None, 40)
    again = train.train(adapter, script, recipe.model_copy(update={"epochs": 4}), tmp_path / "run", Heartbeat(), True)
    assert (again.first_step, again.steps) == (30, 40)


@pytest.mark.check
def test_own_data_needs_a_script_of_ones_own() -> None:
    with pytest.raises(RequestError, match=r"data\.name: expected model\.name own, as own needs a script"):
        schema.load(ROOT / "recipes" / "resnet20-digits.yaml", ["data={name: own}"])
    with pytest.raises(RequestError, match=r"model\.name: expected own for a script of your own, got resnet20"):
        Sides(schema.load(ROOT / "recipes" / "resnet20-digits.yaml"))


@pytest.mark.check
def test_a_parity_that_cannot_be(inside: Hvdkit) -> None:
    done = inside("parity", REGRESSION, "--framework", "pytorch")
    assert done.returncode == 2 and "model own: parity needs the same model under every framework" in done.stderr


@pytest.mark.usefixtures("warm")
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


SCRIPT = """
import sys
from hvdkit.adapters import {framework}
from hvdkit.data.batches import ArraySplit
from hvdkit.tasks.own import Own
from hvdkit import run_task

class Task(Own):
    def samples(self):
        import numpy as np
        x = np.ones((32, 3), "float32")
        return ArraySplit(x, x[:, :1]), ArraySplit(x, x[:, :1])

    def model(self):
        import torch
        return torch.nn.Linear(3, 1)

    def loss(self, outputs, targets):
        return (outputs - targets) ** 2

{end}
"""


LATE = """import torch
class Late(torch.nn.Linear):
  def forward(self, x):
    return super().forward(x[:, :2] if self.training else x)
Task.model = lambda task: Late(3, 1)
Task.loss = lambda task, y, t: y.mean()
run_task(pytorch, Task)"""
FITS_NOT = "import torch\nTask.model = lambda task: torch.nn.Linear(5, 1)\nrun_task(pytorch, Task)"


@pytest.mark.parametrize(
    ("framework", "end", "told"),
    [
        ("tensorflow", "import torch", "line 21: ModuleNotFoundError: No module named 'torch'; the line is `imp"),
        ("keras", "run_task(tensorflow, Task)", "it trains with tensorflow, got --framework keras; give --framework t"),
        ("pytorch", "", 'without training; expected `if __name__ == "__main__": hvdkit.run_task("pytorch", …)` at its'),
        ("pytorch", "from hvdkit.config import Loss", "ModuleNotFoundError: No module named 'hvdkit.config'"),
        ("pytorch", "run_task('pytroch', Task)", "one of pytorch, tensorflow, keras, mxnet, got 'pytroch'"),
        ("pytorch", "run_task(pytorch, Tusk)", "line 21: NameError: name 'Tusk' is not defined; the line is `run_t"),
        ("pytorch", "def (", "line 21: SyntaxError: invalid syntax"),
        ("pytorch", "run_task(pytorch, dict)", "run_task: expected a subclass of hvdkit.Own, got <class 'd"),
        ("pytorch", "run_task(pytorch, Task)", "loss: expected a tensor of one value, the mean over the batch"),
        ("pytorch", "Task.loss = lambda task, y, t: y.absolutely()\nrun_task(pytorch, Task)",
         "line 21, in <lambda>: AttributeError: 'Tensor' object has no attribute 'absolutely' (in the loss, with "
         "outputs of shape (16, 1) and targets of shape (16, 1)); the line is `Task.loss = lambda task, y, t: y.abs"),
        ("pytorch", FITS_NOT, "shapes cannot be multiplied (16x3 and 5x1) (in the model, with inputs of sh"),
        ("pytorch", LATE, "line 24, in forward: RuntimeError: mat1 and mat2 shapes cannot be multiplied (16x2 and"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("warm")
def test_a_script_that_cannot_train_is_a_line(
    framework: str, end: str, told: str, hvdkit: Hvdkit, tmp_path: Path
) -> None:
    adapter = "tensorflow" if framework == "keras" else framework
    (tmp_path / "own.py").write_text(SCRIPT.format(framework=adapter, end=end))
    (tmp_path / "own.yaml").write_text(json.dumps({**DOCUMENT, "batch_size": 16}))
    done = hvdkit("train", "own.yaml", "--framework", framework, "--out", "run")
    assert done.returncode == 2, done.stdout + done.stderr
    assert told in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "run").exists(), "a refused request leaves nothing"


def one_sum(outputs: np.ndarray, targets: np.ndarray) -> Any:
    return 3.0


@pytest.mark.check
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": Own.model}, "Task: expected a method `model` that returns the model, got none"),
        ({"samples": Own.samples}, "Task: expected a method `samples` that returns two splits for `data: {name: own}`"),
        ({"samples": lambda task: 3}, "Task.samples: expected two splits, training and validation, such as"),
        ({"best": "accuracy"}, 'with a minus sign where the lowest is the best, such as best = "-wrong"; got \'acc'),
        ({"metrics": Metrics(("wrong",), nothing)}, "metrics: expected a finite sum over the batch, or (sum, count)"),
        ({"metrics": Metrics(("wrong", "b"), one_sum)}, "for each of wrong, b, got 3.0"),
        ({"metrics": Metrics("wrong", wrong)}, 'Task.metrics: expected Metrics(("name",), function), with a tuple'),  # type: ignore[arg-type]
        ({"best": ""}, 'such as best = "-wrong"; none is set'),
        ({"samples": lambda task: (np.ones(3), np.ones(3))}, "got a tuple of ndarray, ndarray"),
        ({"model": lambda task: None}, "expected that it returns the model, got nothing; is `return`"),
        ({"model": lambda task: dict}, "expected that it returns the model, got the class dict; call it"),
    ],
)
def test_a_task_that_cannot_be_trained_is_a_line(changes: dict[str, Any], told: str) -> None:
    script = setup.RankScript(Sides.build, type("Task", (Sides,), changes))
    with pytest.raises(RequestError, match=re.escape(told)):
        train.train(local_adapter.adapter, script, Recipe.model_validate(DOCUMENT), None, Heartbeat())


@pytest.mark.check
def test_keys_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(RequestError, match=r"recompute: expected false with model\.name own"):
        schema.revise({**DOCUMENT, "recompute": True}, "recipe")
    smoothed = Recipe.model_validate({**DOCUMENT, "loss": {"label_smoothing": 0.1}})
    assert Sides(smoothed).recipe == smoothed
    with pytest.raises(RequestError, match="loss: expected none in the recipe, as Squared has a loss of its own"):
        type("Squared", (Sides,), {"loss": lambda task, y, t: 0})(smoothed)


@pytest.mark.check
@pytest.mark.parametrize(("loss", "got"), [(np.ones((3, 1)), "the shape (3, 1)"), (0.5, "a float")])
def test_a_loss_is_one_value(loss: Any, got: str) -> None:
    adapter: Any = local_adapter.adapter
    with pytest.raises(RequestError, match=re.escape(f"the mean over the batch, or (sum, count), got {got}")):
        Counting(adapter, lambda outputs, targets: loss)(None, None)
    assert Counting(adapter, lambda outputs, targets: np.ones((1,)))(None, None) == 1


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize(
    ("name", "framework", "least"),
    [("dropout", "mxnet", 0.9), pytest.param("pairs", "keras", 0.85, marks=pytest.mark.thorough)],
)
def test_the_other_examples_learn_on_two_ranks(
    name: str, framework: str, least: float, hvdkit: Hvdkit, tmp_path: Path
) -> None:
    words = [ROOT / "examples" / f"{name}.yaml", f"model.script={ROOT / 'examples' / f'{name}_{framework}.py'}"]
    done = hvdkit("train", *words, "--framework", framework, "-np", 2, "threads=1", "--out", "run")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["val_accuracy"] > least
    assert f" {result['unit']}/s, " in done.stdout


@pytest.mark.check
@pytest.mark.parametrize(
    ("text", "framework"),
    [
        ("from hvdkit.adapters import keras\n", "keras"),
        ("from hvdkit.adapters import mxnet as adapter, loading\n", "mxnet"),
        ("def f():\n    import hvdkit.adapters.pytorch as it\n", "pytorch"),
        ("from hvdkit.adapters.tensorflow import training\n", "tensorflow"),
        ("import hvdkit\nif __name__ == '__main__':\n    hvdkit.run_task('mxnet', Task)\n", "mxnet"),
        ("from hvdkit import run_task\nrun_task('keras', Task)\n", "keras"),
        ("from hvdkit.adapters import keras, pytorch\n", None),
        ("from hvdkit.adapters import keras\nrun_task('pytorch', Task)\n", None),
        ("run_task(name, Task)\nother('pytorch')\n", None),
        ("import torch\n", None),
        ("def (\n", None),
    ],
)
def test_a_script_says_for_which_framework_it_is(text: str, framework: str | None, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(text)
    model = {"name": "own", "script": str(tmp_path / "own.py")}
    assert own_script.framework_of(Recipe.model_validate({**DOCUMENT, "model": model})) == framework


@pytest.mark.check
def test_a_script_is_looked_for_beside_the_recipe_and_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        (folder / "only").mkdir(parents=True)
        (folder / "own.py").touch()
    (here / "only" / "a.py").touch()
    (there / "own.yaml").write_text(json.dumps(DOCUMENT))
    monkeypatch.chdir(here)

    def script(*overrides: str) -> str:
        recipe, _ = loading.load(there / "own.yaml", list(overrides))
        assert isinstance(recipe.model, schema.OwnModel)
        return recipe.model.script

    assert script() == script(f"model.script={there / 'own.py'}") == str(there / "own.py")
    assert script("model.script=own.py") == str(here / "own.py")
    assert script("model.script=only/a.py") == str(here / "only" / "a.py")
    assert script("model.script=no.py") == "no.py"
    with pytest.raises(RequestError, match=r"a recipe, YAML, for a class with `model: {name: own, script: own\.py}`"):
        loading.load(there / "own.py", [])
    recipe, _ = loading.load(DOCUMENT, [])
    assert recipe.model.script == str(here / "own.py")  # type: ignore[union-attr]


@pytest.mark.check
def test_a_checkpoint_runs_under_the_framework_that_has_written_it(
    inside: Hvdkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter: Any = local_adapter.adapter
    (tmp_path / "run").mkdir()
    (tmp_path / "own.py").write_text("from hvdkit.adapters import mxnet\n")
    own = {**DOCUMENT, "model": {**DOCUMENT["model"], "script": str(tmp_path / "own.py")}}  # type: ignore[dict-item]
    script = setup.RankScript(Sides.build, Sides)
    train.train(adapter, script, Recipe.model_validate(own), tmp_path / "run", Heartbeat())
    for kept in (tmp_path / "run" / "checkpoints").glob("step-*/checkpoint.json"):
        rewrite_record(kept, framework="mxnet")
    last = tmp_path / "run" / "checkpoints" / "last"
    assert train_.writer(tmp_path / "run") == "mxnet" and train_.writer(tmp_path) is None
    assert evaluate_.plan(last, [], None, Placement()).framework == "mxnet"
    wrong = f"model.script: {tmp_path}/own.py: it trains with mxnet, got --framework keras; give --framework mxnet, or"
    for command in (("evaluate", "run"), ("train", "run/config.yaml", "--out", "new")):
        (tmp_path / "run" / "config.yaml").write_text(json.dumps(own))
        done = inside(*command, "--framework", "keras")
        assert done.returncode == 2 and done.stderr.startswith(wrong), done.stderr
    # hvdkit's own models are evaluated under another framework if that one is not here
    builtin = schema.load(ROOT / "recipes" / "resnet20-digits.yaml")
    assert plans.of_checkpoint(builtin, "mxnet", None, Placement(), "evaluate").framework == "mxnet"
    monkeypatch.setattr(plans, "load", lambda runtime: runtime == "tensorflow")
    assert plans.of_checkpoint(builtin, "mxnet", None, Placement(), "evaluate").framework == "tensorflow"
    assert plans.of_checkpoint(builtin, "mxnet", "pytorch", Placement(), "evaluate").framework == "pytorch"


@pytest.mark.usefixtures("warm")
def test_an_error_in_a_later_step_names_the_line_of_the_script(hvdkit: Hvdkit, tmp_path: Path) -> None:
    late = "calls = []\n\ndef loss(task, y, t):\n    calls.extend([y] if y.requires_grad else [])\n"
    late += "    if len(calls) > 2:  # the check before training has called it once\n        1 / 0\n"
    late += "    return ((y - t) ** 2).mean()\n\nTask.loss = loss\nrun_task(pytorch, Task)"
    (tmp_path / "own.py").write_text(SCRIPT.format(framework="pytorch", end=late))
    (tmp_path / "own.yaml").write_text(json.dumps({**DOCUMENT, "batch_size": 16}))
    done = hvdkit("train", "own.yaml", "--out", "run")
    assert done.returncode == 1 and (tmp_path / "run" / "logs").is_dir(), done.stderr
    told = f"failed at step 1: model.script: {tmp_path}/own.py, line 26, in loss: ZeroDivisionError: division by zero"
    assert told in done.stderr, done.stderr


@pytest.mark.usefixtures("warm")
def test_a_frozen_layer_stays_as_it_is(hvdkit: Hvdkit, tmp_path: Path) -> None:
    frozen = "from torch import nn\ndef model(task):\n"
    frozen += "    layers = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval(), nn.Linear(3, 1))\n"
    frozen += "    nn.init.ones_(layers[0].weight)\n    layers[0].weight.requires_grad_(False)\n    return layers\n\n"
    frozen += "Task.model = model\nTask.loss = lambda task, y, t: ((y - t) ** 2).mean()\nrun_task(pytorch, Task)"
    (tmp_path / "own.py").write_text(SCRIPT.format(framework="pytorch", end=frozen))
    (tmp_path / "own.yaml").write_text(json.dumps({**DOCUMENT, "batch_size": 16, "average_weights": {"from_epoch": 1}}))
    done = hvdkit("train", "own.yaml", "--out", "run", "optimizer.weight_decay=0.5")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["parameters"] == 3 + 6 + 4
    kept = snapshots.read(tmp_path / "run" / "checkpoints" / "last").state
    assert (kept["0.weight"] == 1).all() and "optimizer.mean.0.weight" not in kept
    assert not (kept["2.weight"] == 0).all() and any(name.endswith(".2.weight") for name in kept)
    means = [name for name in kept if name.endswith("1.running_mean")]
    assert len(means) == 2 and not any(kept[name].any() for name in means), "the average's statistics are renewed"
