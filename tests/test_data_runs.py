"""The data side in the runtimes: the same bytes in all of them, folders of images and native pipelines by the command
line, and how bad data ends a run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hvdkit.results.train import TrainResult
from hvdkit.runtimes.pins import FRAMEWORKS as RUNTIME_OF
from hvdkit.runtimes.pins import RUNTIMES
from hvdkit.runtimes.store import find
from tests.conftest import FRAMEWORKS, ROOT, Hvdkit, rest_thorough, run
from tests.data.pictures import draw_folder, write_cifar

pytestmark = pytest.mark.long

IMAGENET = ROOT / "recipes" / "resnet50-imagenet.yaml"
SMALL = ("data.size=32", "data.resize=36", "batch_size=2", "steps=2", "model.name=resnet18", "model.classes=3",
         "log_every=1", "schedule.warmup_epochs=0")  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_folder(tmp_path_factory.mktemp("pictures"))


@pytest.mark.usefixtures("warm")
def test_the_same_bytes_beside_every_framework(folder: Path, tmp_path: Path) -> None:
    cifar = write_cifar(tmp_path / "cifar")
    found = {}
    for name in RUNTIMES:
        frameworks = [framework for framework, runtime in RUNTIME_OF.items() if runtime == name]
        script = ROOT / "tests" / "data" / "pictures.py"
        command = [find(frameworks[0]).python, script, *frameworks, folder, cifar]
        done = run([str(word) for word in command], timeout=120)
        assert done.returncode == 0, done.stderr
        found |= json.loads(done.stdout.splitlines()[-1])
    assert found.keys() == set(FRAMEWORKS)
    assert found["pytorch"].keys() == {"imagefolder", "mnist5k", "cifar10"}
    assert all(each == found["pytorch"] for each in found.values())


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", rest_thorough("pytorch", "keras", "mxnet"))
def test_the_imagenet_recipe_runs_dry(framework: str, folder: Path, hvdkit: Hvdkit, tmp_path: Path) -> None:
    command = ("train", IMAGENET, "--framework", framework, "-np", 2, "--out", "run", f"data.path={folder}", *SMALL)
    done = hvdkit(*command, "check_ranks=1")
    assert done.returncode == 0, done.stderr
    result = TrainResult.model_validate_json((tmp_path / "run" / "result.json").read_text())
    assert (result.steps, result.corrupt_images, result.native_pipeline) == (2, 0, False)
    assert result.val_accuracy is not None and round(result.val_accuracy * 6, 6).is_integer()


@pytest.mark.usefixtures("warm")
def test_corrupt_images_are_counted_over_all_ranks(hvdkit: Hvdkit, tmp_path: Path) -> None:
    draw_folder(tmp_path / "pictures")
    victims = [tmp_path / "pictures" / name for name in ("train/cat/000.JPEG", "val/dog/001.JPEG")]
    for victim in victims:
        victim.write_bytes(victim.read_bytes()[:300])
    path = f"data.path={tmp_path / 'pictures'}"
    whole_epochs = [word for word in SMALL if not word.startswith(("steps", "model.name"))] + ["model.name=resnet8"]
    command = ("train", IMAGENET, "--framework", "pytorch", "-np", 2, "--out", "run", path, *whole_epochs, "epochs=2")
    done = hvdkit(*command, "data.corrupt=replace")
    assert done.returncode == 0, done.stderr
    assert "2 corrupt image(s) replaced" in done.stdout
    assert TrainResult.model_validate_json((tmp_path / "run" / "result.json").read_text()).corrupt_images == 2
    logs = "".join((tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1))
    assert all(f"warning: {victim}: " in logs for victim in victims)

    done = hvdkit(*command, "--overwrite")
    assert done.returncode == 2 and str(victims[0]) in done.stderr and "data.corrupt=replace" in done.stderr


NATIVE = ("name=native", "model.name=resnet8", "optimizer={learning_rate: 0.05}", "schedule={base_batch_size: 32}",
          "steps=3", "log_every=1")  # fmt: skip


@pytest.mark.usefixtures("warm")
def test_a_dataloader_in_the_place_of_hvdkits_own_data(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    native = f"data={{name: native, module: {ROOT / 'examples' / 'native_pytorch.py'}}}"
    done = hvdkit("train", recipe, "--framework", "pytorch", "-np", 2, "--out", "run", native, *NATIVE)
    assert done.returncode == 0, done.stderr
    result = TrainResult.model_validate_json((tmp_path / "run" / "result.json").read_text())
    assert result.native_pipeline and result.steps == 3
    assert result.val_accuracy is not None and round(result.val_accuracy * 360, 6).is_integer()
