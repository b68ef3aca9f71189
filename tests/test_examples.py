"""The examples: each runs on two real ranks, jobs are what `hvdkit submit` writes, pages show them as they are."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

import hvdkit
from examples import draw_shapes
from hvdkit.checkpoint.weights import save_weights
from hvdkit.commands import COMMANDS
from hvdkit.errors import RunError
from hvdkit.launch.launchers import LAUNCHERS
from scripts import examples
from tests.conftest import FRAMEWORKS, ROOT, Hvdkit, rest_thorough
from tests.launching import framework_job
from tests.test_help import asked

pytestmark = pytest.mark.long

ACCURACY = 0.9  # of 360 digits after ten epochs; a small model that has learned nothing has 0.1
EPOCH = re.compile(r"^epoch (\d+): accuracy ([\d.]+), loss ([\d.]+)$", re.MULTILINE)


README = (ROOT / "examples" / "README.md").read_text()
TWO = ["-np", "2", "threads=1"]


def example(framework: str) -> Path:
    return ROOT / "examples" / f"own_model_{framework}.py"


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("framework", rest_thorough(*FRAMEWORKS))
def test_own_network_learns_on_two_ranks(framework: str, tmp_path: Path) -> None:
    job = framework_job(framework, tmp_path, example(framework), tmp_path / "new" / "own.safetensors")
    LAUNCHERS["direct"].run(job)
    epochs = EPOCH.findall(job.log(0).read_text())
    assert len(epochs) == 10
    assert float(epochs[-1][1]) > ACCURACY
    assert float(epochs[-1][2]) < float(epochs[0][2])
    assert not EPOCH.search(job.log(1).read_text())  # the root alone prints
    # what it has saved is the model of the last line, whichever framework reads it
    kept = tmp_path / "new" / "own.safetensors"
    assert f"weights: {kept}" in job.log(0).read_text().splitlines()
    assert all(np.isfinite(values).all() for values in load_file(kept).values())


def test_weights_that_cannot_be_saved_are_a_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"own\.safetensors: cannot be written \(Not a directory|File exists\)"):
        save_weights({"fc.weight": np.zeros(2)}, tmp_path / "file" / "own.safetensors")
    saved = save_weights({"fc.weight": np.ones(2), "optimizer.momentum.fc.weight": np.ones(2)}, tmp_path / "own")
    assert load_file(saved).keys() == {"fc.weight"}


@pytest.mark.check
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_examples_are_short_and_know_no_recipe(framework: str) -> None:
    source = example(framework).read_text()
    assert sum(bool(line) for line in source.splitlines()) <= 42
    assert "recipe" not in source.lower().replace("hvdkit.recipe.", "")
    assert "resnet" not in source.lower()


@pytest.mark.check
def test_the_pages_show_the_examples_as_they_are() -> None:
    for page, language, file in (
        ("own-model.md", "python", "regression_pytorch.py"),
        ("own-model.md", "yaml", "regression.yaml"),
        ("reference/own-model.md", "python", example("pytorch").name),
        ("reference/own-model.md", "python", "handlers_pytorch.py"),
        ("data.md", "python", "native_pytorch.py"),
    ):
        shown = f"```{language}\n{(ROOT / 'examples' / file).read_text()}```"
        assert shown in (ROOT / "docs" / page).read_text(), file


def trained(hvdkit: Hvdkit, *words: object) -> str:
    done = hvdkit("train", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stderr)


@pytest.mark.usefixtures("warm")
def test_a_model_of_images_is_fine_tuned_from_weights_as_torchvision_has_them(hvdkit: Hvdkit, tmp_path: Path) -> None:
    draw_shapes.folder(tmp_path / "photos", count=7)
    draw_shapes.folder(tmp_path / "others", ("rings", "chequers"), count=10)
    trained(hvdkit, ROOT / "examples" / "images.yaml", *TWO, "batch_size=4", "epochs=1", "--out", "runs/images")
    written = hvdkit("export", "runs/images", "--out", "resnet18.safetensors")
    assert written.returncode == 0, written.stderr
    first = load_file(tmp_path / "resnet18.safetensors")
    names = {
        "conv1.weight": (64, 3, 7, 7),
        "layer4.1.bn2.running_var": (512,),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
    }
    assert {name: first[name].shape for name in names} == names and first["fc.weight"].shape == (3, 512)
    still = ["batch_size=4", "epochs=1", "optimizer.learning_rate=1e-9", "--out", "runs/fine"]
    trained(hvdkit, ROOT / "examples" / "finetune.yaml", *TWO, *still)
    assert hvdkit("export", "runs/fine", "--out", "fine.safetensors").returncode == 0
    fine = load_file(tmp_path / "fine.safetensors")
    assert fine["fc.weight"].shape == (2, 512), "a new last layer"
    assert np.allclose(fine["layer4.1.conv2.weight"], first["layer4.1.conv2.weight"], atol=1e-6)


@pytest.mark.usefixtures("warm")
def test_a_gpt_on_ones_own_text(hvdkit: Hvdkit, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text((ROOT / "docs" / "recipe.md").read_text())
    assert hvdkit("tokenizer", "train", "mine.txt", "--out", "tokens.json", "--vocabulary", 512).returncode == 0
    trained(hvdkit, ROOT / "examples" / "gpt.yaml", *TWO, "steps=4", "log_every=1", "--out", "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if not line["ends_epoch"]]
    assert losses[-1] < losses[0] < 1.2 * np.log(512)


@pytest.mark.usefixtures("warm")
def test_a_loop_of_ones_own_learns_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Under `hvdkit launch` such helpers are tried in tests/test_own_loop.py."""
    said = []
    for run in ("first", "again"):
        script = ROOT / "examples" / "own_loop_pytorch.py"
        job = framework_job("pytorch", tmp_path / run, script, tmp_path / "kept")
        LAUNCHERS["direct"].run(job)
        said.append(re.findall(r"epoch (\d): accuracy ([\d.]+)", job.log(0).read_text()))
    assert [epoch for epoch, _ in said[0]] == list("123456") and float(said[0][-1][1]) > 0.8
    assert said[1] == [], "all six epochs were done"


@pytest.mark.usefixtures("warm")
def test_a_model_of_keras_is_fitted_with_equal_weights_on_both_ranks(hvdkit: Hvdkit, tmp_path: Path) -> None:
    done = hvdkit("launch", "-np", "2", "--out", "run", ROOT / "examples" / "fit_keras.py", tmp_path / "kept")
    assert done.returncode == 0, done.stdout + done.stderr
    said = dict(re.findall(r"^\[(\d)\] accuracy ([\d.]+)$", done.stdout, re.MULTILINE))
    assert sorted(said) == ["0", "1"] and said["0"] == said["1"] and float(said["0"]) > 0.8
    assert len((tmp_path / "kept" / "log.csv").read_text().splitlines()) == 7, (
        "a heading, and six epochs of rank 0 alone"
    )


@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("name", rest_thorough("dropout", "pairs"))
def test_scripts_of_ones_own(name: str, hvdkit: Hvdkit) -> None:
    trained(hvdkit, ROOT / "examples" / f"{name}.yaml", *TWO, "steps=3", "--out", "run")


@pytest.mark.check
def test_the_jobs_are_what_submit_writes() -> None:
    jobs = examples.jobs()
    assert set(jobs) == set((ROOT / "examples" / "slurm").glob("*.sbatch"))
    assert [path.name for path, text in jobs.items() if path.read_text() != text] == [], "python -m scripts.schemas"


@pytest.mark.check
def test_each_example_is_in_the_table_with_a_command_that_can_be_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {path.name for path in (ROOT / "examples").iterdir() if path.is_file()} - {"README.md"}
    assert sorted(name for name in files if name not in README) == []
    commands = re.findall(r"`(hvdkit .*?)`", README.partition("|")[2])
    assert len(commands) >= 10
    for words in map(shlex.split, commands):
        name = max((name for name in COMMANDS if words[1:][: len(name.split())] == name.split()), key=len)
        asked(name, words[1:], monkeypatch)


@pytest.mark.check
def test_the_notebook_has_its_outputs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads((ROOT / "examples" / "notebook.ipynb").read_text())["cells"]
             if cell["cell_type"] == "code"]  # fmt: skip
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert len([output for output in outputs if "image/png" in output.get("data", {})]) == 2
    text = json.dumps(outputs)
    assert "error" not in {output["output_type"] for output in outputs}
    assert not re.search(r"/(home|root|tmp|work|Users)/", text), "no folder of a machine"
    with pd.option_context("display.width", 80, "display.max_columns", 20):
        for cell in cells:  # what is counted, and not measured, is the same today
            if any(name in (source := "".join(cell["source"])) for name in ("hvdkit.memory(", "hvdkit.plan(")):
                *statements, shown = source.strip().splitlines()
                exec("\n".join(statements), scope := {"hvdkit": hvdkit})
                said = "".join(cell["outputs"][-1]["data"]["text/plain"])
                assert repr(eval(shown, scope)) == said, "python -m scripts.examples"
