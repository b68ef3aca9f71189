"""What a command says beside its result: what may have been meant, what it leaves out, and when a speed says little."""

from __future__ import annotations

import contextlib
import json
import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from hvdkit.cli import app
from hvdkit.core.step_plan import Progress
from hvdkit.errors import RequestError
from hvdkit.handlers.metrics_file import is_before
from hvdkit.launch.launchers import Launcher
from hvdkit.recipe import registry, schema
from hvdkit.results.doubts import doubts
from hvdkit.results.train import read_metrics
from tests.conftest import Hvdkit
from tests.resuming import local_recipe, local_run

pytestmark = pytest.mark.check

DIGITS, IMAGENET = "resnet20-digits", "resnet50-imagenet"
DRY = ("--dry-run", "--json")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["optimizer.name=adam"], "got 'adam'; did you mean 'adamw'?"),
        (["compression=topq"], "did you mean 'topk'?"),
        (["learning_rate=0.1"], "learning_rate: unknown key; did you mean 'optimizer.learning_rate'?"),
        (["lr=0.1"], "lr: unknown key; did you mean 'optimizer.learning_rate'?"),
        (["optimizer.lr=0.1"], "optimizer.lr: unknown key; did you mean 'optimizer.learning_rate'?"),
        (["optimizer.epochs=3"], "optimizer.epochs: unknown key; did you mean 'epochs'?"),
        (["data.path=/x"], "data.path: unknown key; it needs data.name=cifar10 or data.name=imagefolder"),
        (["model.script=x.py"], "model.script: unknown key; it needs model.name=own"),
        (["optimizer=adamw"], "got 'adamw'; did you mean optimizer.name=adamw?"),
        (["optimizer.beta1=0.8"], "it needs optimizer.name=adamw or optimizer.name=lamb"),
        (["--epochs", "3"], "--epochs: keys of the recipe are given as key=value, without dashes; expected epochs=3"),
        (["--batch-size", 64, "--lr=0.1", "--tensorboard"], "--batch-size, --lr, --tensorboard: keys of the recipe"),
        (["--optimizer.momentum", "0.8", "--framework", "mxnet"], "expected optimizer.momentum=0.8\n"),
        (["dropout=0.1"], "dropout: unknown key; known keys: accumulate"),
        (["loss.name=mse"], "loss.name: unknown key; known keys: class_weights, ignored_label, label_smoothing"),
        (["model=resnet8"], "got 'resnet8'; did you mean model.name=resnet8?"),
        (["lr="], "override 'lr=': expected key=value, such as epochs=2 or optimizer.momentum=0.8; null for none\n"),
        ([".=3"], "command line: '': unknown key; known keys: accumulate"),
        (["--out", ""], "an empty word after --out: expected a value; is a variable of the shell not set?"),
        (["--framework", "a\nb"], "unknown framework 'a\\nb': expected one of"),
        (["epochs=3,seed=4"], "got '3,seed=4'; give each change as a word of its own"),
    ],
)  # fmt: skip
def test_what_may_have_been_meant(words: list[Any], told: str, inside: Hvdkit) -> None:
    done = inside("train", DIGITS, *words)
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


# What users of other tools type most; what to type here.
HABITS = {
    "--device cuda": "device=gpu",
    "--model resnet8": "model.name=resnet8",
    "--arch=resnet18": "model.name=resnet18",
    "--fp16": "precision=fp16",
    "--gradient_accumulation_steps 4": "accumulate=4",
    "--data cifar10": "data.name=cifar10",
    "--min-np 1 --max-np 4": "elastic.min_np=1 elastic.max_np=4",
}


@pytest.mark.parametrize("words", HABITS)
def test_other_tools_options(words: str, inside: Hvdkit) -> None:
    done = inside("train", DIGITS, *words.split())
    names = ", ".join(word for word in words.replace("=", " ").split() if word.startswith("-"))
    told = f"{names}: keys of the recipe are given as key=value, without dashes; expected {HABITS[words]}\n"
    assert (done.returncode, done.stderr) == (2, told)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("amp=true", "amp: unknown key; did you mean precision=fp16?"),
        ("device=cuda", "device: expected 'auto', 'cpu' or 'gpu', got 'cuda'; did you mean 'gpu'?"),
        ("precision=float64", "got 'float64'; did you mean 'fp64'?"),
        ("model.name=resnet_18", "did you mean 'resnet18'?"),
        ("schedule.decay=cosin", "did you mean 'cosine'?"),
    ],
)
def test_other_tools_settings_as_overrides(words: str, told: str, inside: Hvdkit) -> None:
    done = inside("train", DIGITS, words)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith("command line: ") and told in done.stderr


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("resnet20", "did you mean 'resnet20-digits' or 'resnet20-folder'?"),
        ("imagenet", "did you mean 'resnet50-imagenet'?"),
        ("resnet20-digits.yaml", "the recipe that comes with hvdkit is resnet20-digits"),
        ("recipes/resnet20-digits", "the recipe that comes with hvdkit is resnet20-digits"),
        ("mine.yaml", "mine.yaml: no such file"),
        ("run", "run: is the folder of a run; expected a recipe, such as run/config.yaml; --out run --resume after it"),
    ],
)
def test_what_is_no_recipe(given: str, told: str, inside: Hvdkit, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    done = inside("train", given)
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_faults_name_the_file_or_the_command_line(inside: Hvdkit, tmp_path: Path) -> None:
    """Each fault is blamed on where it was written, also one that an override brings to another key."""
    text = registry.locate(Path(DIGITS)).read_text().replace("momentum:", "momentun:")
    (tmp_path / "mine.yaml").write_text(text)
    done = inside("train", "mine.yaml", "epochs=many", "data.name=cifar10", "optimizer.beta1=0.9")
    assert done.stderr.splitlines() == [
        "command line: data.path: required key is missing",
        "command line: epochs: expected a whole number, got 'many'",
        "mine.yaml: optimizer.momentun: unknown key; did you mean 'momentum'?",
        "command line: optimizer.beta1: unknown key; it needs optimizer.name=adamw or optimizer.name=lamb",
    ]
    with pytest.raises(RequestError, match=r"^overrides: epochs: expected a whole number, got 'many'$"):
        schema.load(registry.locate(Path(DIGITS)), ["epochs=many"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", DIGITS, "--foo", "3"], "No such option: --foo"),
        (["bench", "allreduce", "--epochs", "3"], "No such option: --epochs"),
        (["train", DIGITS, "--epoch", "3"], "--epoch: no such option; did you mean 'epochs'?"),
        (["train", DIGITS, "--help", "--epoch", "3"], "--epoch: no such option; did you mean 'epochs'?"),
        (["train", DIGITS, "--framewrk", "mxnet"], "--framewrk: no such option; did you mean '--framework'?"),
        (["train"], "Missing argument 'RECIPE.yaml'; see `hvdkit train --help`"),
        (["train", DIGITS, "-np", "two"], "-np two: expected a whole number; see `hvdkit train --help`"),
        (["train", DIGITS, "--stall-timeout=soon"], "--stall-timeout soon: expected a number"),
        (["compare", DIGITS, "--margin", "-1"], "--margin -1: expected at least 0, less than 1"),
        (["compare", DIGITS, "--margin", "0.3"], "--margin: expected --earlier with it"),
        (["advise", DIGITS, "--epoch-images", "0"], "--epoch-images 0: expected at least 1"),
        (["trian", DIGITS], "No such command 'trian'. Did you mean 'train'?; see `hvdkit --help`"),
        (["runtime", "biuld"], "Did you mean 'build'?; see `hvdkit runtime --help`"),
        (["--foo"], "No such option: --foo"),
    ],
)
def test_a_wrong_command_line_is_refused_in_a_line(words: list[str], told: str, inside: Hvdkit) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(app, "app", partial(app.app, prog_name="hvdkit")))
        done = inside(*words)
    assert done.returncode == 2 and told in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1


def load(name: str, *overrides: str) -> tuple[schema.Recipe, list[str]]:
    notes: list[str] = []
    return schema.load(registry.locate(Path(name)), overrides, notes), notes


def test_another_choice_leaves_out_what_belonged_to_the_former() -> None:
    recipe, notes = load(DIGITS, "optimizer.name=adamw")
    assert (recipe.optimizer.name, recipe.optimizer.learning_rate) == ("adamw", 0.05)
    assert notes == [
        "optimizer.name=adamw: left out of the recipe: momentum (of optimizer sgd)",
        "optimizer.name=adamw: learning_rate is still the recipe's 0.05 for sgd; for adamw begin with "
        "optimizer.learning_rate=0.001",
    ]
    assert len(load(DIGITS, "optimizer.name=adamw", "optimizer.learning_rate=0.05")[1]) == 1
    recipe, notes = load(IMAGENET, "data.name=digits", "schedule.decay=cosine", "optimizer.name=lars")
    assert (recipe.data.augment, recipe.schedule.milestones, recipe.optimizer.momentum) == ("none", [], 0.9)
    assert notes == [
        "optimizer.name=lars: left out of the recipe: nesterov (of optimizer sgd)",
        "data.name=digits: left out of the recipe: path, size, resize, augment (of data imagefolder)",
        "schedule.decay=cosine: left out of the recipe: milestones, gamma (of schedule step)",
    ]
    recipe, notes = load(IMAGENET, "optimizer.name=sgd", "data.path=/elsewhere")
    assert recipe.optimizer.nesterov and notes == []
    assert load(DIGITS, "optimizer={name: adamw, learning_rate: 0.001}")[1] == []


@pytest.mark.parametrize("where", ["command line", "file"])
def test_what_a_user_wrote_for_that_choice_is_a_fault(where: str, inside: Hvdkit, tmp_path: Path) -> None:
    path, words = DIGITS, ["optimizer.name=adamw", "optimizer.momentum=0.8"]
    if where == "file":
        text = registry.locate(Path(DIGITS)).read_text().replace("name: sgd", "name: adamw")
        (tmp_path / "mine.yaml").write_text(text)
        path, words = "mine.yaml", []
    done = inside("train", path, *words)
    assert done.returncode == 2 and "optimizer.momentum: unknown key; it needs optimizer.name=sgd" in done.stderr


def test_before_a_run(inside: Hvdkit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setattr(Launcher, "run", lambda self, job, tick: (tmp_path / "started").touch())
    crowd = "-np 2: more ranks than this machine's 1 core; they wait for each other, so speeds say little"
    done = inside("train", DIGITS, "-np", 2)
    assert (tmp_path / "started").exists()
    place = next((tmp_path / "runs").iterdir()).relative_to(tmp_path)
    told = done.stderr.splitlines()
    assert told[:2] == [f"no --out: checkpoints go to {place}; --out {place} --resume continues from them", crowd]
    for command in ("profile", "compare"):
        assert crowd in inside(command, DIGITS, "-np", 2, *(["--no-parity"] if command == "compare" else [])).stderr
    assert crowd in inside("bench", "allreduce", "--seconds", 0.1).stderr
    quiet = inside("train", DIGITS, "-np", 1, "checkpoint=null").stderr
    assert "no --out" not in quiet and "more ranks" not in quiet
    assert "no --out" not in inside("train", DIGITS, "--out", "named").stderr
    assert (
        crowd not in inside("train", DIGITS, "-np", 2, "--launcher", "horovodrun", "-H", "far.invalid:2", *DRY).stdout
    )


def test_a_speed_that_says_little(tmp_path: Path) -> None:
    result = local_run(tmp_path, local_recipe(epochs=1))
    assert result
    sound = result.model_copy(update={"noisy": False})
    assert doubts(sound) == [] or sound.measured_steps < 5
    for steps, told in ((1, "1 step only"), (4, "4 steps only")):
        (line,) = doubts(sound.model_copy(update={"measured_steps": steps}))
        assert line == f"images/s was measured over {told}; train longer, or give a smaller warmup_steps"
    (line,) = doubts(sound.model_copy(update={"measured_steps": 0, "first_step": sound.steps}))
    assert line == "images/s is of the earlier command, from metrics.jsonl: this one has trained no step"
    (line,) = doubts(sound.model_copy(update={"measured_steps": 5, "noisy": True, "load": 0.34, "idle_cores": None}))
    assert line.startswith("noisy: other processes used 34 % of this machine's CPU time") and "threads=" not in line
    crowded = {"measured_steps": 5, "noisy": True, "load": 0.6, "threads": 4, "idle_cores": 2.4}
    (line,) = doubts(sound.model_copy(update=crowded))
    assert "left 2.4 cores to each rank of 4 threads" in line and "threads=2 may be several times faster" in line
    for enough in ({"threads": 2}, {"threads": 1, "idle_cores": 0.3}):
        (line,) = doubts(sound.model_copy(update=crowded | enough))
        assert "threads=" not in line


def test_a_run_that_has_finished_says_so_and_how_to_train_longer(inside: Hvdkit, tmp_path: Path) -> None:
    recipe = schema.load(registry.locate(Path(DIGITS)), ["epochs=2", "log_every=20"])
    local_run(tmp_path / "run", recipe)
    (tmp_path / "run" / "config.yaml").write_text(schema.dump(recipe))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    (tmp_path / "run" / "result.json").write_text(json.dumps(result | {"framework": "pytorch", "noisy": False}))
    resume = ("train", DIGITS, "--framework", "pytorch", "--out", "run", "--resume", "log_every=20")
    done = inside(*resume, "epochs=2")
    assert done.returncode == 0, done.stderr
    place = tmp_path / "run"
    longer = f"{place}: already finished: 2 epochs, 88 steps; nothing to do. To train longer: epochs=4"
    assert done.stderr.splitlines() == [longer], "no epoch is shown again"


def test_a_line_of_the_earlier_run_is_known_by_the_progress(tmp_path: Path) -> None:
    result = local_run(tmp_path, local_recipe(epochs=2, steps=22))  # 15 updates an epoch
    lines = list(read_metrics(tmp_path / "metrics.jsonl"))
    assert result and [line.step for line in lines if not line.ends_epoch] == [4, 8, 12, 16, 20]
    within, between = Progress(step=16, epoch=1, samples=96), Progress(step=15, epoch=1)
    for progress, recounted, earlier in ((within, False, 5), (within, True, 4), (between, False, 4)):
        assert [is_before(line, progress, recounted) for line in lines[:5]] == [place < earlier for place in range(5)]


def test_a_run_that_kept_nothing_says_so(inside: Hvdkit, tmp_path: Path) -> None:
    for name, checkpoint in (("none", None), ("soon", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(schema.dump(local_recipe(checkpoint=checkpoint)))
        (tmp_path / name / "metrics.jsonl").touch()
        for command in (["evaluate"], ["export", "--out", "net.safetensors"]):
            done = inside(*command, name)
            assert done.returncode == 2 and f"{name}: this run has kept no checkpoint" in done.stderr, done.stderr
    newest = "; the newest run here is runs/b\n"
    for number, name in enumerate("ab"):
        place = tmp_path / "runs" / name / "checkpoints"
        (place / "step-1").mkdir(parents=True)
        (place / "last").symlink_to("step-1")
        os.utime(place / "last", (number, number), follow_symlinks=False)
    for command in (["evaluate"], ["export", "--out", "net.onnx"]):
        for name, told in (
            ("nowhere", "nowhere: no such folder; expected a run's folder, such as runs/photos, or a checkpoint's"),
            ("none/config.yaml", "none/config.yaml: is a file; expected a run's folder"),
            ("runs", "runs: neither a run nor a checkpoint is in it; expected a run's folder"),
        ):
            done = inside(*command, name)
            assert done.returncode == 2 and done.stderr.startswith(told) and done.stderr.endswith(newest), done.stderr
