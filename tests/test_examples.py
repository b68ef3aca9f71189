"""The examples: own models learn on two ranks, jobs are what `hvdkit submit` writes, pages show them as they are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hvdkit.checkpoint.weights import save_weights
from hvdkit.commands import COMMANDS
from hvdkit.errors import RunError
from hvdkit.launch.launchers import LAUNCHERS
from scripts import examples
from tests.conftest import FRAMEWORKS, ROOT, rest_thorough
from tests.launching import framework_job
from tests.test_help import asked

pytestmark = pytest.mark.long

ACCURACY = 0.9  # of 360 digits after ten epochs; a small model that has learned nothing has 0.1
EPOCH = re.compile(r"^epoch (\d+): accuracy ([\d.]+), loss ([\d.]+)$", re.MULTILINE)


README = (ROOT / "examples" / "README.md").read_text()


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
