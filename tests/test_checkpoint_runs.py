"""Checkpoints of real frameworks: killed and gone on from, evaluated by the others, and started from.

Ranks of three runtimes stay for the whole file and take its cases one by one; what matters to the command line is done
by it.
"""

from __future__ import annotations

import hashlib
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, load_file, save_file

from hvdkit.checkpoint import snapshots
from hvdkit.commands import compare, profile, tune
from hvdkit.commands.checked_run import make_plan
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema
from hvdkit.results.evaluate import EvaluationResult
from hvdkit.results.train import TrainResult
from tests import hygiene
from tests.conftest import FRAMEWORKS, ROOT, Hvdkit, rest_thorough
from tests.launching import wait_until
from tests.residents import START, Ranks
from tests.resuming import lines, rewrite_record, under_way

pytestmark = [pytest.mark.long, pytest.mark.timeout(400), pytest.mark.usefixtures("warm")]


def result(folder: Path) -> TrainResult:
    return TrainResult.model_validate_json((folder / "result.json").read_text())


# What each rank keeps for itself is in a checkpoint too: residuals and momentum, rounds of Local SGD, PowerSGD's Q.
SENT = {
    "pytorch": ("compression={method: topk, ratio: 0.02, momentum_correction: true}",),
    "tensorflow": ("sync={every: 4, outer: nesterov}", "compression={method: int8, error_feedback: true}"),
    "keras": (),
    "mxnet": ("compression=powersgd",),
}


@pytest.mark.parametrize("framework", rest_thorough(*FRAMEWORKS))
def test_kill_9_and_resume(framework: str, ranks: START, recipe: Path, tmp_path: Path) -> None:
    """11 batches an epoch and rank in 6 updates; killed behind the third, whose line is written and no checkpoint."""
    common = ["model.name=resnet8", "epochs=1", "log_every=3", "batch_size=64", "accumulate=2", "threads=1"]
    case: dict[str, Any] = {"framework": framework, "recipe": recipe}
    case["overrides"] = [*common, "checkpoint={every_steps: 2}", *SENT[framework]]
    mortal = Ranks(framework, tmp_path / "mortal")
    try:
        mortal.begin("train", **case, out=tmp_path / "killed", hold_at=3)
        held = tmp_path / "mortal" / "logs" / "rank-0.beat"
        place = tmp_path / "killed" / "checkpoints" / "step-00000002"
        assert wait_until(lambda: place.exists() and " 3 train step" in held.read_text(), 120), mortal.failure
        assert "SIGKILL" in str(mortal.kill())
    finally:
        mortal.end()
    assert ranks(framework).do("train", **case, out=tmp_path / "killed", resume=True)["first_step"] == 2
    assert ranks(framework).do("train", **case, out=tmp_path / "whole")["first_step"] == 0
    whole, resumed = result(tmp_path / "whole"), result(tmp_path / "killed")
    assert whole.np == 2 and whole.steps == resumed.steps == 6
    assert whole.final_weights_sha256 == resumed.final_weights_sha256 != whole.initial_state_sha256
    assert (whole.val_accuracy, whole.val_loss) == (resumed.val_accuracy, resumed.val_loss)
    assert lines(tmp_path / "whole") == lines(tmp_path / "killed")


@pytest.mark.parametrize("framework", ["pytorch", pytest.param("keras", marks=pytest.mark.thorough)])
def test_a_run_that_was_asked_to_stop_ends_with_the_same_bits(
    framework: str, ranks: START, recipe: Path, tmp_path: Path
) -> None:
    """Ranks' own running statistics, averages of them, and losses that are not logged yet are continued from."""
    common = ["model.name=resnet8", "epochs=1", "log_every=4", "batch_size=64", "threads=1", "checkpoint={}"]
    case: dict[str, Any] = {"framework": framework, "recipe": recipe}
    case["overrides"] = [*common, "average_weights={decay: 0.9}", "compression={method: topk, ratio: 0.1}"]
    whole = ranks(framework).do("train", **case, out=tmp_path / "whole")
    stop_at = random.Random(framework).choice([2, 3, 6, 7])
    stopped = ranks(framework).do("train", **case, out=tmp_path / "stopped", stop_at=stop_at)
    assert stopped == {"status": 0, "message": f"stopped after step {stop_at} of 11, as asked"}
    place = tmp_path / "stopped" / "checkpoints"
    merged = snapshots.read(place / "last").state
    assert any(name.endswith("running_var") for name in merged), "evaluation takes one model"
    resumed = ranks(framework).do("train", **case, out=tmp_path / "stopped", resume=True)
    assert resumed["first_step"] == stop_at and whole["steps"] == resumed["steps"] == 11
    assert (whole["val_accuracy"], whole["val_loss"]) == (resumed["val_accuracy"], resumed["val_loss"])
    once = ("warnings",)  # what a recipe does not reach is said by each process
    figures = [[line | dict.fromkeys(once) for line in lines(tmp_path / name)] for name in ("whole", "stopped")]
    assert figures[0] == figures[1]
    one, other = (snapshots.read(tmp_path / name / "checkpoints" / "last").state for name in ("whole", "stopped"))
    assert one.keys() == other.keys()
    assert not [name for name, array in one.items() if array.tobytes() != other[name].tobytes()]


# A checkpoint of one framework, gone on from in each: in float64 the next step ends at the same state.

OPTIMIZERS = {
    "sgd": "optimizer={name: sgd, learning_rate: 0.05, momentum: 0.9, weight_decay: 1.0e-2}",
    "adamw": "optimizer={name: adamw, learning_rate: 0.01, weight_decay: 1.0e-1}",
}
SLOTS = {"sgd": ("momentum",), "adamw": ("exp_avg", "exp_avg_sq")}


@pytest.mark.parametrize(
    ("writer", "optimizer", "readers"),
    [
        ("pytorch", "sgd", ("keras", "mxnet", "tensorflow")),
        ("mxnet", "adamw", ("pytorch",)),
        pytest.param("mxnet", "adamw", ("keras", "tensorflow"), marks=pytest.mark.thorough),
    ],
)
def test_the_next_step_is_the_same_in_every_framework(
    writer: str, optimizer: str, readers: tuple[str, ...], ranks: START, recipe: Path, tmp_path: Path
) -> None:
    overrides = ["model.name=resnet8", "precision=fp64", "batch_size=16", "epochs=1", "steps=4", "threads=1"]
    overrides += ["checkpoint={every_steps: 1, keep: 9}", "data.augment=crop-flip", OPTIMIZERS[optimizer]]
    case: dict[str, Any] = {"recipe": recipe, "overrides": overrides, "out": tmp_path / "run"}
    ranks(writer).do("train", framework=writer, **case)
    third, fourth = (tmp_path / "run" / "checkpoints" / f"step-0000000{step}" for step in (3, 4))
    before, reference = snapshots.read(third), snapshots.read(fourth).state
    assert before.record.framework == writer
    assert all(f"optimizer.{slot}.conv1.weight" in reference for slot in SLOTS[optimizer])
    moved = {name: error(before.state[name], value) for name, value in reference.items() if name != "optimizer.step"}
    assert min(moved[name] for name in moved if name.endswith("weight")) > 1e-6, "the step shows"
    for framework in readers:
        shutil.rmtree(fourth)
        ranks(framework).do("train", framework=framework, **case, resume=True)
        found = snapshots.read(fourth)
        assert (found.record.framework, found.record.progress.step) == (framework, 4)
        assert found.state.keys() == reference.keys(), framework
        apart = {name: error(found.state[name], value) for name, value in reference.items()}
        worst = max(apart, key=lambda name: apart[name])
        print(f"{writer}, {optimizer}, then {framework}: {apart[worst]:.1e} in {worst}")
        assert apart[worst] <= 1e-9, f"{framework}: {apart[worst]:.1e} in {worst}"


def error(got: np.ndarray, reference: np.ndarray) -> float:
    return float(np.linalg.norm(got - reference) / np.linalg.norm(reference))


def test_a_gpt_goes_on_elsewhere_with_all_at_once(ranks: START, tmp_path: Path) -> None:
    """Local SGD of top-k updates, accumulated: begun by PyTorch, ended by MXNet as MXNet alone, evaluated by Keras."""
    sizes = ["model.layers=1", "model.heads=2", "model.width=16", "model.context=16", "data.validation=0.005"]
    sent = ["sync={every: 4}", "compression={method: topk, ratio: 0.1}", "accumulate=2", "schedule.warmup_epochs=0"]
    # each rank has its own AdamW, and a checkpoint the mean: so both runs make one behind the fourth update
    overrides = [*sizes, *sent, "checkpoint={every_steps: 4}", "precision=fp64", "threads=1"]
    case: dict[str, Any] = {"recipe": ROOT / "recipes" / "gpt-tiny.yaml"}
    whole = ranks("mxnet").do(
        "train", framework="mxnet", **case, overrides=[*overrides, "steps=8"], out=tmp_path / "whole"
    )
    case["out"] = tmp_path / "parts"
    ranks("pytorch").do("train", framework="pytorch", **case, overrides=[*overrides, "steps=4"])
    ended = ranks("mxnet").do("train", framework="mxnet", **case, overrides=[*overrides, "steps=8"], resume=True)
    assert (ended["first_step"], ended["steps"], ended["unit"]) == (4, 8, "tokens")
    states = [snapshots.read(tmp_path / name / "checkpoints" / "step-00000008") for name in ("whole", "parts")]
    reference, found = (each.state for each in states)
    assert found.keys() == reference.keys()
    apart = {name: error(found[name], value) for name, value in reference.items() if np.any(value)}
    assert max(apart.values()) <= 1e-9, sorted(apart.items(), key=lambda each: -each[1])[:3]
    assert ended["validation"] == pytest.approx(whole["validation"], rel=1e-9)
    settings = states[1].record.recipe
    place = tmp_path / "parts" / "checkpoints" / "step-00000008"
    ranks("keras").do("evaluate", framework="keras", checkpoint=place, recipe=settings, out=tmp_path / "evaluated")
    evaluated = EvaluationResult.model_validate_json((tmp_path / "evaluated" / "evaluate.json").read_text())
    assert evaluated.metrics == pytest.approx(ended["validation"], rel=1e-9)
    assert evaluated.metrics["bits_per_byte"] < 8, "of bytes that are drawn by chance"


def test_a_checkpoint_of_another_framework_is_gone_on_from_by_the_command_line(
    ranks: START, hvdkit: Hvdkit, recipe: Path, tmp_path: Path
) -> None:
    """The result that lies in the folder is the other framework's, and is replaced."""
    overrides = ["model.name=resnet8", "batch_size=16", "epochs=1", "threads=1", "checkpoint={every_steps: 1}"]
    first = {"framework": "pytorch", "recipe": recipe, "overrides": [*overrides, "steps=2"], "out": tmp_path / "run"}
    ranks("pytorch").do("train", **first)
    options = ("--framework", "mxnet", "-np", 2, "--out", "run", "--resume")
    done = hvdkit("train", recipe, *options, *overrides, "steps=4")
    assert done.returncode == 0 and "continues from step 2" in done.stderr, done.stderr
    found = result(tmp_path / "run")
    assert (found.framework, found.first_step, found.steps) == ("mxnet", 2, 4)


def test_all_frameworks_count_the_same_images_right(
    checkpoint_40: Path, ranks: START, hvdkit: Hvdkit, tmp_path: Path
) -> None:
    settings = snapshots.read(checkpoint_40).record.recipe
    counted = set()
    for framework in FRAMEWORKS:
        if framework == "mxnet":
            done = hvdkit("evaluate", checkpoint_40, "--framework", framework, "--out", framework)
            assert done.returncode == 0, done.stderr
        else:
            case = {"checkpoint": checkpoint_40, "recipe": settings | {"threads": 1}, "out": tmp_path / framework}
            assert ranks(framework).do("evaluate", framework=framework, **case) is None
        found = EvaluationResult.model_validate_json((tmp_path / framework / "evaluate.json").read_text())
        assert (found.framework, found.trained_by, found.total) == (framework, "mxnet", 360)
        assert found.np == (1 if framework == "mxnet" else 2)
        counted.add(found.correct)
    assert f"correct {found.correct} of 360" in done.stdout
    trained = TrainResult.model_validate_json((checkpoint_40.parents[1] / "result.json").read_text())
    assert trained.val_accuracy and counted == {round(360 * trained.val_accuracy)}


def test_a_network_that_has_run_away_is_told(checkpoint_40: Path, ranks: START, tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled"
    shutil.copytree(checkpoint_40, spoiled)
    old = (spoiled / snapshots.MODEL).read_bytes()
    save_file({name: np.full_like(array, np.nan) for name, array in load(old).items()}, spoiled / snapshots.MODEL)
    new = (spoiled / snapshots.MODEL).read_bytes()
    digests = [hashlib.sha256(content).hexdigest() for content in (old, new)]
    record = spoiled / snapshots.RECORD
    record.write_text(record.read_text().replace(*digests))
    rewrite_record(record)
    recipe = snapshots.read(spoiled).record.recipe | {"threads": 1}
    refused = ranks("mxnet").do("evaluate", framework="mxnet", checkpoint=spoiled, recipe=recipe, out=tmp_path / "out")
    assert refused["status"] == 1 and "its loss is no number" in refused["message"], refused


def test_sigterm_ends_behind_a_checkpoint_with_status_0(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    settings = ("epochs=5000", "log_every=100000", "checkpoint={every_epochs: 0, every_steps: 30}")
    command = (recipe, "--framework", "mxnet", "-np", 2, "model.name=resnet8", "batch_size=4", *settings)
    with under_way(tmp_path / "run", *command) as process:  # nothing is logged yet
        process.terminate()
        # docs/checkpoints.md promises 30 s on a machine that is not loaded.
        _, said = process.communicate(timeout=hygiene.patience(60))
    assert process.returncode == 0, said
    found, _ = snapshots.newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    step = found.record.progress.step
    assert f"stopped by SIGTERM after {tmp_path}/run/checkpoints/step-{step:08}" in said
    assert step > 0 and not (tmp_path / "run" / "result.json").exists()
    limit = f"steps={step + 2}"
    done = hvdkit("train", *command, "--out", "run", "--resume", limit)
    assert done.returncode == 0, done.stderr
    result = TrainResult.model_validate_json((tmp_path / "run" / "result.json").read_text())
    assert (result.first_step, result.steps) == (step, step + 2)


@pytest.mark.parametrize("asked", [[], ["checkpoint={every_steps: 1}"]], ids=["by default", "asked"])
def test_runs_that_only_measure_keep_nothing(
    asked: list[str], recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the recipe says: the comparison's, with all rivals, the profile's, and those before `tune: measure`."""
    given = schema.load(recipe, asked)
    compared = compare.schedule(given, ["mxnet"], [1, 2], Placement(), ["plain", "kvstore", "independent"]).plans
    assert len(compared) == 6
    tuned: list[schema.Recipe] = []
    monkeypatch.setattr(tune, "launch", lambda plan, recipe, *rest: tuned.append(schema.load(recipe)))
    tune._speed(make_plan(given, "mxnet", Placement(2)), tmp_path / "tuning")
    profiled = profile.plan(given, "mxnet", Placement(2)).plan.recipe
    for each in [*(plan.recipe for plan in compared), *tuned, profiled]:
        assert each.checkpoint is None
    assert len(tuned) == 1 and given.checkpoint is not None


def test_fine_tuning_starts_from_a_file_in_torchvisions_layout(
    hvdkit: Hvdkit, checkpoint_40: Path, ranks: START, recipe: Path, tmp_path: Path
) -> None:
    """A checkpoint's own file is one. With as many classes it starts where that left; with more, the head is new."""
    source = f"model.weights={checkpoint_40 / 'model.safetensors'}"
    settings = [source, "model.name=resnet8", "steps=1", "optimizer.learning_rate=1e-9"]
    case: dict[str, Any] = {"framework": "pytorch", "recipe": recipe}
    small = [*settings, "threads=1", "checkpoint={}"]
    assert ranks("pytorch").do("train", **case, overrides=small, out=tmp_path / "same")["val_accuracy"] is not None
    was = load_file(checkpoint_40 / "model.safetensors")
    now = load_file(tmp_path / "same" / "checkpoints" / "step-00000001" / "model.safetensors")
    for name in (name for name in was if "running" not in name):  # statistics have moved on by a step
        assert now[name] == pytest.approx(was[name], abs=1e-6), name
    done = hvdkit("train", recipe, "--framework", "pytorch", *settings, "--out", "more", "model.classes=12")
    assert done.returncode == 2 and "fc.weight: expected shape (12, 64), got (10, 64)" in done.stderr
    assert "model.new_head=true" in done.stderr and "Traceback" not in done.stderr
    head = [*small, "model.classes=12", "model.new_head=true"]
    assert ranks("pytorch").do("train", **case, overrides=head, out=tmp_path / "head")["steps"] == 1
