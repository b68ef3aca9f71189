"""What the ends of epochs decide: early stopping, and averages of weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from hvdkit import tasks
from hvdkit.checkpoint import snapshots
from hvdkit.core.session import Session
from hvdkit.core.step_plan import Progress, StepPlan
from hvdkit.data import Shard
from hvdkit.data.batches import epoch_batches
from hvdkit.errors import RequestError
from hvdkit.handlers.stopping import check_early_stopping, note_epoch, stopped_early
from hvdkit.recipe import schema
from hvdkit.recipe.schema import AverageWeights, EarlyStopping, Loss, Recipe, Sgd
from hvdkit.worker.unreached import unreached
from tests import local_adapter
from tests.conftest import ROOT, Hvdkit, rest_thorough
from tests.local_adapter import Linear
from tests.residents import START
from tests.resuming import lines, local_recipe, local_run

RECIPE = ROOT / "recipes" / "resnet20-digits.yaml"
TINY = ["model.name=resnet8", "batch_size=16", "threads=1", "accumulate=2"]  # two updates an epoch of two ranks
TINY += ["data={name: synthetic, height: 16, width: 16, train_images: 96, val_images: 40}"]


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


# Averages of weights

EMA, SWA = "average_weights={decay: 0.8}", "average_weights={from_epoch: 2}"


def weights(folder: Path, step: int) -> dict[str, np.ndarray]:
    return load_file(folder / "checkpoints" / f"step-{step:08}" / "model.safetensors")


def average(folder: Path, step: int) -> dict[str, np.ndarray]:
    return load_file(folder / "checkpoints" / f"step-{step:08}" / "average.safetensors")


# Each framework's strategies; a checkpoint after each update has the weights that the average must be of.
WAYS = [
    ("pytorch", "sharding=none"),
    ("pytorch", "sharding=optimizer"),
    pytest.param("pytorch", "sharding=gradients", marks=pytest.mark.thorough),
    ("pytorch", "sharding=parameters"),
    ("pytorch", "sync={every: 3}"),
    ("pytorch", "compression={method: topk, ratio: 0.1}"),
    ("tensorflow", "sharding=optimizer"),
    pytest.param("keras", "compression=fp16", marks=pytest.mark.thorough),
    ("mxnet", "sharding=none"),
    pytest.param("mxnet", "sharding=optimizer", marks=pytest.mark.thorough),  # in float32: the next test
]


@pytest.mark.parametrize(("framework", "way"), WAYS)
def test_an_exponential_average_is_that_of_each_updates_weights(
    framework: str, way: str, ranks: START, tmp_path: Path
) -> None:
    """Over four updates, of which the last ones are those of a run that is resumed: it ends with the same bits."""
    case: dict[str, Any] = {"recipe": RECIPE, "framework": framework}
    case["overrides"] = [*TINY, "precision=fp64", "epochs=2", "checkpoint={every_steps: 1, keep: 9}", EMA, way]
    found = ranks(framework).do("train", **case, out=tmp_path / "run")
    last = found["steps"]
    by_hand = weights(tmp_path / "run", 1)
    for step in range(1, last + 1):
        now, kept = weights(tmp_path / "run", step), average(tmp_path / "run", step)
        by_hand = {name: 0.8 * by_hand[name] + 0.2 * now[name] for name in now} if step > 1 else now
        assert kept.keys() == by_hand.keys()
        worst = max(float(np.abs(kept[name] - by_hand[name]).max()) for name in kept)
        assert worst <= 1e-12, (step, worst)
    assert found["average_validation"].keys() == found["validation"].keys()
    assert found["average_validation"] != found["validation"]
    assert found["state_bytes"]["average"] == found["state_bytes"]["optimizer"], "it is divided as the slots are"
    if framework in ("tensorflow", "keras"):
        return  # where each run compiles its step anew
    begun = {**case, "overrides": [*case["overrides"], f"steps={last // 2 + 1}"]}
    ranks(framework).do("train", **begun, out=tmp_path / "resumed")
    again = ranks(framework).do("train", **case, out=tmp_path / "resumed", resume=True)
    assert (again["first_step"], again["average_validation"]) == (last // 2 + 1, found["average_validation"])
    kept, resumed = average(tmp_path / "run", last), average(tmp_path / "resumed", last)
    assert all(np.array_equal(kept[name], resumed[name]) for name in kept)


def test_an_average_is_evaluated_where_an_evaluation_has_changed_the_order_of_weights(
    ranks: START, tmp_path: Path
) -> None:
    """As MXNet changes that of convolutions in float32, of which no views may be taken; shares of them are such."""
    case: dict[str, Any] = {"recipe": RECIPE, "framework": "mxnet", "out": tmp_path / "run"}
    found = ranks("mxnet").do("train", **case, overrides=[*TINY, "epochs=2", EMA, "sharding=optimizer"])
    last = found["steps"]
    now, kept = weights(tmp_path / "run", last), average(tmp_path / "run", last)
    assert found["average_validation"] != found["validation"]
    assert all(np.abs(kept[name] - now[name]).max() < 1 for name in now if name.endswith("weight"))


@pytest.mark.parametrize("framework", rest_thorough("pytorch", "tensorflow", "keras", "mxnet"))
def test_ranks_stop_together_with_the_equal_average_of_the_ends_of_epochs_and_statistics_of_its_own(
    framework: str, ranks: START, tmp_path: Path
) -> None:
    """An epoch is two updates. Statistics that were averaged would be those of other weights."""
    case: dict[str, Any] = {"recipe": RECIPE, "framework": framework, "out": tmp_path / "run"}
    case["overrides"] = [*TINY, "precision=fp64", "epochs=5", "checkpoint={keep: 9}", SWA]
    case["overrides"] += ["early_stopping={patience: 2, min_delta: 1.0}"]  # accuracy cannot improve by so much
    stopped = ranks(framework).do("train", **case)
    told = "stopped early after epoch 3 of 5: accuracy has not improved by more than 1 since epoch 1"
    assert stopped.get("stopped_early") == told, stopped
    assert (stopped["epochs"], stopped["steps"]) == (3, 6)
    assert stopped["checkpoints"]["last"].endswith("step-00000006")
    ends = [weights(tmp_path / "run", step) for step in (2, 4, 6)]
    assert not (tmp_path / "run" / "checkpoints" / "step-00000002" / "average.safetensors").exists()
    kept = average(tmp_path / "run", 6)
    statistics = {name for name in kept if name.endswith(("running_mean", "running_var"))}
    for name in kept.keys() - statistics:
        assert np.abs(kept[name] - (ends[1][name] + ends[2][name]) / 2).max() <= 1e-14, name
    found = statistics_of(kept["conv1.weight"], schema.load(RECIPE, TINY), epoch=2)
    for name, expected in zip(("bn1.running_mean", "bn1.running_var"), found, strict=True):
        assert np.abs(kept[name] - expected).max() <= 1e-6 * np.abs(expected).max(), name  # inputs are in float32
        between = (ends[1][name] + ends[2][name]) / 2
        assert np.abs(between - expected).max() > 1e-3 * np.abs(expected).max(), "averaged ones would be others"
    in_file = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    validations = [line.get("average_validation", {}).keys() for line in in_file if line["ends_epoch"]]
    assert validations == [set(), {"accuracy", "loss"}, {"accuracy", "loss"}]


def statistics_of(kernel: np.ndarray, recipe: Recipe, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """The means over the batches of both ranks of the mean and the unbiased variance behind a 3×3 convolution."""
    split, means, variances = tasks.choose(recipe).open_data(Shard()).train, [], []
    for rank in (0, 1):
        for batch in epoch_batches(split, 16, recipe.seed, epoch, rank, 2, recipe.data.augment):
            padded = np.pad(np.asarray(batch.inputs, np.float64), ((0, 0), (1, 1), (1, 1), (0, 0)))
            windows = [padded[:, y : y + 16, x : x + 16] for y in range(3) for x in range(3)]
            patches = np.stack(windows, axis=3).reshape(-1, 9 * 3)
            by_patch = kernel.transpose(2, 3, 1, 0).reshape(27, -1)
            means.append(patches.mean(axis=0) @ by_patch)
            variances.append(np.einsum("io,ij,jo->o", by_patch, np.cov(patches.T), by_patch))
    return np.mean(means, axis=0), np.mean(variances, axis=0)


@pytest.mark.usefixtures("warm")
def test_commands_say_that_training_stopped_early_and_use_averages(hvdkit: Hvdkit, tmp_path: Path) -> None:
    words = ("train", RECIPE, *TINY, EMA, "epochs=3", "early_stopping={patience: 1, min_delta: 1}")
    done = hvdkit(*words, "early_stopping.metric=-perplexity")
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    assert "early_stopping.metric: expected one of accuracy, loss, with a minus sign" in done.stderr
    done = hvdkit(*words, "--out", "run")
    line = "stopped early after epoch 2 of 3: accuracy has not improved by more than 1 since epoch 1"
    assert done.returncode == 0 and line in done.stdout, done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["stopped_early"] == line and result["average_validation"] != result["validation"]
    for options, key, averaged in (((), "average_validation", True), (("--no-average",), "validation", False)):
        done = hvdkit("evaluate", "run/checkpoints/last", *options, "--out", key)
        assert done.returncode == 0 and (", averaged weights: correct" in done.stdout) is averaged, done.stderr
        found = json.loads((tmp_path / key / "evaluate.json").read_text())
        assert (found["averaged"], found["metrics"]) == (averaged, pytest.approx(result[key], rel=1e-5))
        done = hvdkit("export", "run/checkpoints/last", *options, "--out", f"{key}.safetensors")
        assert done.returncode == 0 and ("averaged weights written" in done.stdout) is averaged, done.stderr
        file = "average.safetensors" if averaged else "model.safetensors"
        inside, exported = (
            load_file(tmp_path / "run/checkpoints/last" / file),
            load_file(tmp_path / f"{key}.safetensors"),
        )
        assert inside.keys() == exported.keys() and all(np.array_equal(inside[name], exported[name]) for name in inside)
    done = hvdkit(*words, "--out", "run", "--resume")
    assert done.returncode == 0 and f"run: {line}; nothing to do. To train longer: a larger" in done.stderr


@pytest.mark.check
def test_the_best_checkpoint_is_that_of_the_average_and_an_update_that_overflows_adds_nothing(tmp_path: Path) -> None:
    result = local_run(tmp_path / "run", local_recipe(epochs=4, average_weights={"decay": 0.9}))
    assert result and result.average_validation
    ends = [line for line in lines(tmp_path / "run") if line["ends_epoch"]]
    best = snapshots.read(tmp_path / "run" / "checkpoints" / "best")
    assert best.record.progress.judged == best.record.progress.average_validation
    rates = {line["step"]: line["average_validation"]["accuracy"] for line in ends}
    assert rates[best.record.progress.step] == max(rates.values())
    averaged, plain = best.model(), best.model(average=False)
    assert (averaged[1], plain[1]) == (True, False) and averaged[0].keys() == plain[0].keys()
    adapter: Any = local_adapter.adapter
    session = Session(adapter, Linear(3, 2), Sgd(learning_rate=0.1), Loss(), precision="fp16")
    session.keep_average(AverageWeights(decay=0.9))
    gradients = {name: tensor * 0 for name, tensor in session.trainable.parameters.items()}
    with np.errstate(invalid="ignore"):
        session.update({name: gradient + np.inf for name, gradient in gradients.items()})
    assert not session.update.weight_average.started
    session.update(gradients)
    assert session.state()["optimizer.averaged"] == 1


@pytest.mark.check
def test_an_average_that_the_run_is_too_short_for_is_doubted() -> None:
    def said(*overrides: str) -> list[str]:
        plan = StepPlan(schema.load(RECIPE, overrides), 1437, 2)
        return [line for line in unreached(plan) if "average" in line]

    assert not said("average_weights={decay: 0.972}") and not said("average_weights={from_epoch: 8}")
    (line,) = said("average_weights={from_epoch: 3}", "steps=50")
    assert line.startswith("average_weights.from_epoch=3: the run ends after 50 steps")
    with pytest.raises(RequestError, match=r"expected either decay, .* got neither"):
        schema.load(RECIPE, ["average_weights={}"])
