"""What the ends of epochs decide: early stopping, and averages of weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import FRAMEWORKS, ROOT, Hvdkit
from residents import START, residents
from resuming import lines, local_recipe, local_run

from hvdkit import tasks
from hvdkit.checkpoint import snapshots
from hvdkit.core.step_plan import Progress
from hvdkit.core.stopping import check_early_stopping, note_epoch, stopped_early
from hvdkit.errors import RequestError
from hvdkit.recipe import schema
from hvdkit.recipe.schema import EarlyStopping

RECIPE = ROOT / "recipes" / "resnet20-digits.yaml"
SMALL = ["model.name=resnet8", "batch_size=64", "threads=1"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[START]:
    """Two ranks of each runtime."""
    with residents(tmp_path_factory.mktemp("residents")) as start:
        yield start


# Early stopping


@pytest.mark.check
@pytest.mark.parametrize(
    ("metric", "values", "min_delta", "best", "line"),
    [
        ("accuracy", (0.5, 0.7, 0.7, 0.6), 0.0, 2, "after epoch 4 of 9: accuracy has not improved since epoch 2"),
        ("-loss", (2.0, 1.0, 0.995, 0.991), 0.01, 2, "loss has not improved by more than 0.01 since epoch 2"),
        ("-loss", (2.0, 2.5, 0.5, 0.6), 0.0, 3, None),
        ("accuracy", (0.5, 0.4, 0.45, 0.51), 0.0, 4, "after epoch 3 of 9: accuracy has not improved since epoch 1"),
    ],
)
def test_patience_counts_epochs_since_the_best(
    metric: str, values: tuple[float, ...], min_delta: float, best: int, line: str | None
) -> None:
    settings = EarlyStopping(metric=metric, patience=2, min_delta=min_delta)
    task, progress = tasks.choose(schema.load(RECIPE)), Progress()
    said = []
    for epoch, value in enumerate(values):
        progress.epoch, progress.validation = epoch, {metric.removeprefix("-"): value}
        note_epoch(settings, task, progress)
        said += [found] if (found := stopped_early(settings, progress, epoch + 1, 9)) else []
    assert progress.best_epoch == best
    assert (line is None and not said) or (line is not None and line in said[0]), said
    assert stopped_early(settings, progress, 9, 9) is None, "the last epoch ends training anyway"


@pytest.mark.check
def test_metrics_that_nobody_measures_are_refused() -> None:
    task = tasks.choose(schema.load(RECIPE))
    with pytest.raises(RequestError, match=r"early_stopping\.metric: expected one of accuracy, loss, .* got -acuracy"):
        check_early_stopping(EarlyStopping(metric="-acuracy", patience=1), task, 360)
    with pytest.raises(RequestError, match=r"early_stopping\.metric: expected -loss, as lower is better, got loss"):
        check_early_stopping(EarlyStopping(metric="loss", patience=1), task, 360)
    with pytest.raises(RequestError, match="early_stopping: expected validation samples, got none"):
        check_early_stopping(EarlyStopping(patience=1), task, 0)
    text = tasks.choose(schema.load(ROOT / "recipes" / "gpt-tiny.yaml"))
    check_early_stopping(EarlyStopping(metric="-bits_per_byte", patience=1), text, 9)


@pytest.mark.check
def test_a_run_that_is_resumed_stops_at_the_same_epoch_and_says_so_again(tmp_path: Path) -> None:
    changes = {"epochs": 6, "early_stopping": {"patience": 2, "min_delta": 1.0, "metric": "-loss"}}
    recipe = local_recipe(**changes)
    whole = local_run(tmp_path / "whole", recipe)
    assert whole and whole.stopped_early and (whole.epochs, whole.first_step) == (3, 0)
    assert whole.stopped_early == (
        "stopped early after epoch 3 of 6: loss has not improved by more than 1 since epoch 1"
    )
    a_third = whole.steps // 3
    assert whole.steps == 3 * a_third and lines(tmp_path / "whole")[-1]["step"] == whole.steps
    assert snapshots.read(tmp_path / "whole" / "checkpoints" / "last").record.progress.step == whole.steps
    assert local_run(tmp_path / "killed", recipe, kill_at=2 * a_third + 2) is None
    resumed = local_run(tmp_path / "killed", recipe, resume=True)
    assert resumed and resumed.first_step >= 2 * a_third and resumed.stopped_early == whole.stopped_early
    assert resumed.final_weights_sha256 == whole.final_weights_sha256
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    again = local_run(tmp_path / "whole", recipe, resume=True)
    assert again and (again.stopped_early, again.steps) == (whole.stopped_early, whole.steps)
    assert again.first_step == whole.steps, "nothing is trained"
    more = local_recipe(**changes | {"early_stopping": None})
    longer = local_run(tmp_path / "whole", more, resume=True)
    assert longer and longer.stopped_early is None and longer.steps == 6 * a_third


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_all_ranks_stop_together_in_every_framework(framework: str, ranks: START, tmp_path: Path) -> None:
    stops = "early_stopping={patience: 1, min_delta: 1.0}"  # accuracy cannot improve by so much
    case: dict[str, Any] = {"recipe": RECIPE, "overrides": [*SMALL, "epochs=4", "accumulate=4", stops]}
    found = ranks(framework).do("train", framework=framework, **case, out=tmp_path / "run")
    assert found["stopped_early"] == (
        "stopped early after epoch 2 of 4: accuracy has not improved by more than 1 since epoch 1"
    )
    assert (found["epochs"], found["steps"]) == (2, 6) and found["checkpoints"]["last"].endswith("step-00000006")
    again = ranks(framework).do("train", framework=framework, **case, out=tmp_path / "run", resume=True)
    assert (again["stopped_early"], again["first_step"], again["steps"]) == (found["stopped_early"], 6, 6)


@pytest.mark.usefixtures("warm")
def test_the_command_says_that_it_stopped_early_and_does_nothing_more(hvdkit: Hvdkit, tmp_path: Path) -> None:
    words = ("train", RECIPE, *SMALL, "epochs=3", "steps=40", "early_stopping={patience: 1, min_delta: 1}")
    done = hvdkit(*words, "early_stopping.metric=-perplexity")
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "early_stopping.metric: expected one of accuracy, loss, with a minus sign" in done.stderr
    done = hvdkit(*words, "-np", 1, "--out", "run")
    line = "stopped early after epoch 2 of 2: "
    assert done.returncode == 0 and line not in done.stdout, "the steps end in the second epoch anyway"
    done = hvdkit(*words, "steps=null", "--out", "run", "--overwrite")
    line = "stopped early after epoch 2 of 3: accuracy has not improved by more than 1 since epoch 1"
    assert done.returncode == 0 and line in done.stdout, done.stderr
    assert json.loads((tmp_path / "run" / "result.json").read_text())["stopped_early"] == line
    done = hvdkit(*words, "steps=null", "--out", "run", "--resume")
    assert done.returncode == 0 and f"run: {line}; nothing to do. To train longer: a larger" in done.stderr
