"""One's own images on real ranks: the commands of docs/own-images.md as they stand, and the same answers everywhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from examples.draw_shapes import BASIC, draw, folder
from hvdkit.checkpoint import snapshots
from hvdkit.recipe import schema
from hvdkit.recipe.schema import ImageFolder
from hvdkit.results.evaluate import read_evaluation
from hvdkit.results.predict_images import ImagePredictions
from tests.conftest import ROOT, Hvdkit, rest_thorough, run

pytestmark = pytest.mark.long

NAMES = BASIC


def photos(root: Path, count: int, seed: int = 0) -> Path:
    """A folder with `count` pictures of each class."""
    return folder(root, NAMES, count, seed)


def commands() -> list[str]:
    """The commands of the page's first screen."""
    page = (ROOT / "docs" / "own-images.md").read_text()
    block = re.search(r"```\n(.*?)```", page, re.DOTALL)
    assert block
    found = [line.split(" #")[0].strip() for line in block[1].splitlines() if line.strip()]
    assert 3 <= len(found) <= 5 and "predict-images" in found[-1]
    return found


def test_the_five_commands_of_the_page(tmp_path: Path) -> None:
    """From a folder of photos to what is in a picture. `make driver` has been run where tests run."""
    photos(tmp_path / "photos", 40)
    truth = NAMES[2]
    draw(truth, np.random.default_rng(99)).save(tmp_path / "picture.jpg")
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    for command in commands():
        words = shlex.split(command)
        if words[0] == "make":
            done = run([*words, "--dry-run"], 60, cwd=ROOT)
            assert done.returncode == 0 and "scripts/bootstrap.py" in done.stdout, done.stderr
            continue
        done = run(words, 300, cwd=tmp_path, env=os.environ | {"COLUMNS": "120"})
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if words[1] == "train":
            assert "3 classes (disc, lying stripes, upright stripes); 96 images for training, 24 for" in done.stderr
            assert "warning" not in done.stderr
            assert "what is in a picture: hvdkit predict-images runs/photos PICTURE.jpg" in done.stdout
    assert any("picture.jpg" in line and truth in line for line in done.stdout.splitlines()), done.stdout
    resolved = schema.load(tmp_path / "runs" / "photos" / "config.yaml")
    assert isinstance(resolved.data, ImageFolder) and not resolved.undecided
    assert (resolved.model.classes, resolved.data.size, resolved.data.resize) == (3, 32, 37)
    result = json.loads((tmp_path / "runs" / "photos" / "result.json").read_text())
    assert result["val_accuracy"] > 0.8, "three classes that a child tells apart"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, warm_runtimes: Path) -> Path:
    """A folder with `photos`, and `run`, which was trained on them under plain script and two epochs only."""
    place = tmp_path_factory.mktemp("trained")
    photos(place / "photos", 20)
    words = ["train", "resnet20-folder", "data.path=photos", "model.name=resnet8", "epochs=2", "--out", "run"]
    environment = os.environ | {"HVDKIT_RUNTIMES": str(warm_runtimes), "OMP_NUM_THREADS": "1"}
    done = run([sys.executable, "-m", "hvdkit", *words, "schedule.warmup_epochs=0"], 120, cwd=place, env=environment)
    assert done.returncode == 0, done.stderr
    return place


def test_the_checkpoint_knows_its_pictures(trained: Path) -> None:
    record = snapshots.read(trained / "run" / "checkpoints" / "last").record
    assert record.preprocessing is not None and record.preprocessing.class_names == NAMES
    raw = json.loads((trained / "run" / "checkpoints" / "last" / "checkpoint.json").read_text())["preprocessing"]
    assert raw == {
        "class_names": list(NAMES), "size": 32, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225],
        "channels": 3, "resize": 37,
    }  # fmt: skip
    assert "48 images for training, 12 for validation" in (trained / "run" / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize("framework", rest_thorough("mxnet", "pytorch", "tensorflow", "keras"))
def test_every_framework_says_what_evaluation_counts(
    framework: str, trained: Path, hvdkit: Hvdkit, tmp_path: Path, warm: None
) -> None:
    """The held-out images are the same under all, and predicting them one by one gives evaluation's accuracy."""
    run_ = trained / "run"
    done = hvdkit("evaluate", run_, f"data.path={trained / 'photos'}", "--framework", framework, "--out", "e")
    assert done.returncode == 0, done.stderr
    evaluated = read_evaluation(tmp_path / "e" / "evaluate.json")
    kept = snapshots.read(snapshots.locate(run_)).record
    assert evaluated.total == 12 and evaluated.accuracy == pytest.approx(kept.progress.validation["accuracy"])
    data = schema.revise(kept.recipe, "kept").data
    assert isinstance(data, ImageFolder)
    from hvdkit.data.imagefolder import look

    val = look(data.model_copy(update={"path": str(trained / "photos")}), 1).val
    files = [val.path(index) for index in range(len(val))]
    done = hvdkit("predict-images", run_, *files, "--framework", framework, "--out", "p")
    assert done.returncode == 0 and "written to" in done.stdout, done.stderr
    found = ImagePredictions.read(tmp_path / "p" / "predict-images.json")
    assert [each.file for each in found.pictures] == files and found.framework == framework
    right = sum(each.classes[0].name == Path(each.file).parent.name for each in found.pictures)
    assert right == evaluated.correct
    for each in found.pictures:
        assert sum(guess.probability for guess in each.classes) == pytest.approx(1, abs=1e-6)
        assert [guess.name for guess in each.classes] == [NAMES[guess.label] for guess in each.classes]
    truth = [NAMES.index(Path(name).parent.name) for name in files]
    chances = [
        next(guess.probability for guess in each.classes if guess.label == label)
        for each, label in zip(found.pictures, truth, strict=True)
    ]
    assert float(-np.log(chances).mean()) == pytest.approx(evaluated.loss, rel=1e-4)


@pytest.mark.usefixtures("warm")
def test_a_resumed_run_has_the_same_validation_images_and_refuses_others(trained: Path, tmp_path: Path) -> None:
    words = ["train", "resnet20-folder", "model.name=resnet8", "epochs=1", "schedule.warmup_epochs=0", "--out", "run"]

    def train(*more: str) -> str:
        done = run([sys.executable, "-m", "hvdkit", *words, *more], 120, cwd=tmp_path)
        assert done.returncode == (2 if "data.path=others" in more else 0), done.stderr
        return done.stderr

    (tmp_path / "photos").symlink_to(trained / "photos")
    train("data.path=photos", "--framework", "mxnet")
    train("data.path=photos", "epochs=2", "--resume", "--framework", "pytorch")
    logs = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "48 images for training, 12 for validation" in logs
    (tmp_path / "others").mkdir()
    for name in NAMES:
        (tmp_path / "others" / name.upper()).symlink_to(trained / "photos" / name)
    told = train("data.path=others", "epochs=3", "--resume")
    assert f"expected the checkpoint's classes ({', '.join(NAMES)}), got DISC" in told


def test_a_script_without_hvdkits_command_decides_the_same(trained: Path, tmp_path: Path) -> None:
    """As under plain horovodrun, where no driver has looked into the folder."""
    from hvdkit.runtimes.store import find

    runtime = find("pytorch")
    script, recipe = ROOT / "recipes" / "pytorch" / "resnet.py", ROOT / "recipes" / "resnet20-folder.yaml"
    words = [f"data.path={trained / 'photos'}", "model.name=resnet8", "steps=1", "--out", str(tmp_path)]
    command = [str(runtime.python), str(script), str(recipe), *words]
    done = run(command, 120, env=os.environ | runtime.environment | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    mine = snapshots.read(tmp_path / "checkpoints" / "last").record
    theirs = snapshots.read(trained / "run" / "checkpoints" / "last").record
    assert mine.preprocessing == theirs.preprocessing
    assert (mine.recipe["model"], mine.recipe["data"] | {"path": "photos"}) == (
        theirs.recipe["model"],
        theirs.recipe["data"],
    )
