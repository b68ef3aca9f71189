"""What a command says beside its result: what may have been meant, what it leaves out, and when a speed says little."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import simulating
from conftest import Hvdkit, run
from resuming import local_recipe, local_run

from hvdkit.core.step_plan import Progress, is_before
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.recipe import registry, schema
from hvdkit.results import profile as profiles
from hvdkit.results.train import doubts, read_metrics, read_result

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
        (["checkpoint.best=mae"], "checkpoint.best: unknown key; the class in your script has it (docs/own-model.md)"),
        (["metrics=[mae]"], "metrics: unknown key; the class in your script has it (docs/own-model.md)"),
        (["optimizer=adamw"], "got 'adamw'; did you mean optimizer.name=adamw?"),
        (["optimizer.beta1=0.8"], "it needs optimizer.name=adamw or optimizer.name=lamb"),
        (["--epochs", "3"], "--epochs: keys of the recipe are given as key=value, without dashes; expected epochs=3"),
        (["--batch-size", 64, "--lr=0.1", "--tensorboard"],
         "--batch-size, --lr, --tensorboard: keys of the recipe are given as key=value, without dashes; expected "
         "batch_size=64 optimizer.learning_rate=0.1 tensorboard=true"),
        (["--optimizer.momentum", "0.8", "--framework", "mxnet"], "expected optimizer.momentum=0.8\n"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["train", "compare"])
def test_what_may_have_been_meant(command: str, words: list[Any], told: str, inside: Hvdkit) -> None:
    done = inside(command, DIGITS, *words)
    assert done.returncode == 2 and told in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_an_option_that_is_no_key_either_is_typers_to_refuse(inside: Hvdkit) -> None:
    for words in (("train", DIGITS, "--epoch", "3"), ("bench", "allreduce", "--epochs", "3")):
        done = inside(*words)
        assert done.returncode == 2 and "No such option" in done.stderr, done.stderr


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


def test_a_misspelt_key_of_the_file_is_not_left_out(inside: Hvdkit, tmp_path: Path) -> None:
    text = registry.locate(Path(DIGITS)).read_text().replace("momentum:", "momentun:")
    (tmp_path / "mine.yaml").write_text(text)
    done = inside("train", "mine.yaml", "optimizer.name=adamw")
    assert done.returncode == 2 and "optimizer.momentun: unknown key" in done.stderr


@pytest.mark.parametrize("option", ["-n", "-np", "--np"])
def test_every_command_takes_the_number_of_ranks_by_both_names(option: str, inside: Hvdkit, tmp_path: Path) -> None:
    for command in ("train", "profile", "parity"):
        assert len(json.loads(inside(command, DIGITS, option, 2, *DRY).stdout)["runs"][0]["ranks"]) == 2
    compared = json.loads(inside("compare", DIGITS, "--framework", "mxnet", option, 1, option, 2, *DRY).stdout)
    assert [len(each["ranks"]) for each in compared["runs"]] == [1, 2]
    assert "-np 1: expected 2 or more" in inside("bench", "allreduce", option, 1).stderr
    assert (
        "-np 0: expected"
        in inside("advise", DIGITS, option.replace("-n", "-np") if option == "-n" else option, 0).stderr
    )
    profiles.save(simulating.profile(), tmp_path / "profile.json")
    asked = ("profile.json", "--cluster", "v100-nvlink-ib", option, 4)
    assert inside("predict", *asked, "--out", "p").returncode == 0
    assert json.loads((tmp_path / "p" / "predict.json").read_text())["points"][0]["ranks"] == 4
    assert inside("advise", *asked, "--out", "a").returncode == 0
    assert json.loads((tmp_path / "a" / "advise.json").read_text())["today"]["ranks"] == 4


def test_before_a_run(inside: Hvdkit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    monkeypatch.setitem(LAUNCHERS, "direct", lambda job, tick: (tmp_path / "started").touch())
    crowd = "-np 2: more ranks than this machine's 1 core; they wait for each other, so speeds say little"
    done = inside("train", DIGITS, "-np", 2)
    assert (tmp_path / "started").exists()
    place = next((tmp_path / "runs").iterdir()).relative_to(tmp_path)
    told = done.stderr.splitlines()
    assert told[:2] == [f"no --out: checkpoints go to {place}; --out {place} --resume goes on from them", crowd]
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
    assert "nowhere/checkpoint.json: cannot be read" in inside("evaluate", "nowhere").stderr


# A recipe's script

SCRIPT = [sys.executable, "-c", "import sys; from hvdkit.adapters import local; from hvdkit.worker.entry import main; "
          "main(local, lambda table: local.Linear(3072, 10), sys.argv[1:])"]  # fmt: skip


def test_a_script_without_a_recipe_shows_its_whole_help() -> None:
    for words in ([], ["--resume"]):
        done = run([*SCRIPT, *words], timeout=60)
        assert done.returncode == 2 and done.stdout == ""
        for part in (
            "usage:",
            "Train one rank of a recipe",
            "RECIPE.yaml",
            "changes to the recipe",
            "--rival",
            "expected a",
        ):
            assert part in done.stderr, done.stderr
    done = run([*SCRIPT, str(registry.locate(Path(DIGITS))), "--epochs", "3"], timeout=60)
    assert done.returncode == 2 and "--epochs: keys of the recipe are given as key=value" in done.stderr


def test_a_script_ends_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert local_run(None, local_recipe(epochs=1))
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "images/s, step" in each]
    assert line.startswith("local ") and line.endswith("; --out FOLDER keeps all figures and the weights")
    assert local_run(tmp_path / "run", local_recipe(epochs=1))
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"all figures: {tmp_path / 'run' / 'result.json'}" and "{" not in out
    assert read_result(tmp_path / "run" / "result.json").framework == "local"
