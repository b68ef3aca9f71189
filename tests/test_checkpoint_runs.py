"""Checkpoints of real frameworks: killed and gone on from, evaluated by the others, and started from."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
from conftest import FRAMEWORKS, Hvdkit
from resuming import kill_ranks, lines, under_way
from safetensors.numpy import load, load_file, save_file

from hvdkit.core import checkpoint
from hvdkit.results import EvaluationResult, TrainResult

SETTINGS = ("epochs=1", "log_every=3", "batch_size=64", "checkpoint={every_steps: 2}", "accumulate=2")
# What each rank keeps for itself is in a checkpoint too: residuals and momentum, rounds of Local SGD, PowerSGD's Q.
SENT = {
    "pytorch": ("compression={method: topk, ratio: 0.02, momentum_correction: true}",),
    "tensorflow": ("sync={every: 4, outer: nesterov}", "compression={method: int8, error_feedback: true}"),
    "keras": (),
    "mxnet": ("compression=powersgd",),
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_kill_9_and_resume(framework: str, hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    """11 batches an epoch and rank in 6 updates."""
    options, settings = ("--framework", framework, "-np", 2), (*SETTINGS, *SENT[framework])
    whole = hvdkit("train", recipe, *options, "--out", "whole", *settings)
    assert whole.returncode == 0, whole.stderr
    with under_way(tmp_path / "killed", recipe, *options, *settings) as process:
        kill_ranks(tmp_path / "killed", framework)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 1, said
    resumed = hvdkit("train", recipe, *options, "--out", "killed", "--resume", *settings)
    assert resumed.returncode == 0, resumed.stderr
    results = [
        TrainResult.model_validate_json((tmp_path / name / "result.json").read_text()) for name in ("whole", "killed")
    ]
    assert results[1].first_step > 0 == results[0].first_step
    assert results[0].final_weights_sha256 == results[1].final_weights_sha256
    assert (results[0].val_accuracy, results[0].val_loss) == (results[1].val_accuracy, results[1].val_loss)
    assert lines(tmp_path / "whole") == lines(tmp_path / "killed")


def test_all_frameworks_count_the_same_images_right(checkpoint_40: Path, hvdkit: Hvdkit, tmp_path: Path) -> None:
    counted = set()
    for framework in FRAMEWORKS:
        done = hvdkit("evaluate", checkpoint_40, "--framework", framework, "--out", framework)
        assert done.returncode == 0, done.stderr
        found = EvaluationResult.model_validate_json((tmp_path / framework / "evaluate.json").read_text())
        assert (found.framework, found.trained_by, found.total) == (framework, "mxnet", 360)
        assert f"correct {found.correct} of 360" in done.stdout
        counted.add(found.correct)
    trained = TrainResult.model_validate_json((checkpoint_40.parents[1] / "result.json").read_text())
    assert trained.val_accuracy and counted == {round(360 * trained.val_accuracy)}


def test_a_network_that_has_run_away_is_told(checkpoint_40: Path, hvdkit: Hvdkit, tmp_path: Path) -> None:
    spoiled = tmp_path / "spoiled"
    shutil.copytree(checkpoint_40, spoiled)
    old = (spoiled / checkpoint.MODEL).read_bytes()
    save_file({name: np.full_like(array, np.nan) for name, array in load(old).items()}, spoiled / checkpoint.MODEL)
    new = (spoiled / checkpoint.MODEL).read_bytes()
    digests = [hashlib.sha256(content).hexdigest() for content in (old, new)]
    record = spoiled / checkpoint.RECORD
    record.write_text(record.read_text().replace(*digests))
    done = hvdkit("evaluate", spoiled, "--framework", "mxnet", "--out", "out")
    assert done.returncode == 1 and "its loss is no number" in done.stderr, done.stderr


def test_sigterm_ends_behind_a_checkpoint_with_status_0(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    settings = ("epochs=5000", "log_every=100000", "checkpoint={every_epochs: 0, every_steps: 30}")
    command = (recipe, "--framework", "mxnet", "-np", 2, *settings)
    with under_way(tmp_path / "run", *command) as process:  # nothing is logged yet
        process.terminate()
        _, said = process.communicate(timeout=120)  # docs/checkpoints.md promises 30 s of a machine that is not loaded
    assert process.returncode == 0, said
    found, _ = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    step = found.record.progress.step
    assert f"stopped by SIGTERM behind {tmp_path}/run/checkpoints/step-{step:08}" in said
    assert step > 0 and not (tmp_path / "run" / "result.json").exists()
    limit = f"steps={step + 2}"
    done = hvdkit("train", *command, "--out", "run", "--resume", limit)
    assert done.returncode == 0, done.stderr
    result = TrainResult.model_validate_json((tmp_path / "run" / "result.json").read_text())
    assert (result.first_step, result.steps) == (step, step + 2)


def test_more_classes_and_other_networks_are_refused_by_tensor(checkpoint_40: Path, hvdkit: Hvdkit) -> None:
    for override, part in (("model.classes=11", "fc.weight: expected shape (11, 64), got (10, 64)"),
                           ("model.name=resnet18", "is missing")):  # fmt: skip
        done = hvdkit("evaluate", checkpoint_40, "--framework", "mxnet", "--out", override, override)
        assert done.returncode == 2 and part in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_wrong_folders_and_options_are_one_line(
    checkpoint_40: Path, hvdkit: Hvdkit, recipe: Path, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint_40, broken)
    save_file({"fc.weight": np.zeros(1)}, broken / "model.safetensors")
    for arguments, part in (
        (("evaluate", "nowhere"), "nowhere/checkpoint.json: cannot be read"),
        (("evaluate", broken), "model.safetensors: damaged"),
        (("evaluate", checkpoint_40, "epochs=x"), "epochs: expected"),
        (("train", recipe, "--resume"), "--resume: expected --out"),
        (("train", recipe, "--resume", "--out", "r"), "a `checkpoint` section"),
        (("train", recipe, "--resume", "--overwrite", "--out", "r", "checkpoint={}"), "expected one of them, got both"),
        (("train", recipe, "--out", "r", "checkpoint={every_epochs: 0}"), "expected every_epochs or every_steps"),
    ):
        done = hvdkit(*arguments)
        assert done.returncode == 2 and part in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert not (tmp_path / "r").exists()


def test_fine_tuning_starts_from_a_file_in_torchvisions_layout(
    hvdkit: Hvdkit, checkpoint_40: Path, recipe: Path, tmp_path: Path
) -> None:
    """A checkpoint's own file is one. With as many classes it starts where that left; with more, the head is new."""
    source = f"model.weights={checkpoint_40 / 'model.safetensors'}"
    arguments = ("train", recipe, "--framework", "pytorch", source, "steps=1", "optimizer.learning_rate=1e-9")
    done = hvdkit(*arguments, "--out", "same", "checkpoint={}")
    assert done.returncode == 0 and "validation accuracy" in done.stdout, done.stderr
    was = load_file(checkpoint_40 / "model.safetensors")
    now = load_file(tmp_path / "same" / "checkpoints" / "step-00000001" / "model.safetensors")
    for name in (name for name in was if "running" not in name):  # statistics have moved on by a step
        assert now[name] == pytest.approx(was[name], abs=1e-6), name
    done = hvdkit(*arguments, "--out", "more", "model.classes=12")
    assert done.returncode == 2 and "fc.weight: expected shape (12, 64), got (10, 64)" in done.stderr
    assert "model.new_head=true" in done.stderr and "Traceback" not in done.stderr
    done = hvdkit(*arguments, "--out", "head", "model.classes=12", "model.new_head=true")
    assert done.returncode == 0, done.stderr
