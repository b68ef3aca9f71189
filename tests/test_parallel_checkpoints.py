"""Checkpoints of a model that was divided into stages and parts: other commands and meshes take the whole model."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import Hvdkit, run
from tests.divided import RUN, SMALL, continues

pytestmark = [pytest.mark.thorough, pytest.mark.usefixtures("warm")]

DIVIDED = ("-np", 4, "parallel.pipeline=2", "parallel.tensor=2", "parallel.microbatches=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, warm_runtimes: Path) -> Path:
    """The folder of a run of three steps; to be read only."""
    folder = tmp_path_factory.mktemp("divided")
    command = [sys.executable, "-m", "hvdkit", *RUN, "--framework", "pytorch", *SMALL, *map(str, DIVIDED), "steps=3"]
    done = run(command, 120, cwd=folder, env=os.environ | {"HVDKIT_RUNTIMES": str(warm_runtimes)})
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.parametrize(("framework", "other"), [("pytorch", "batch_size=3"), ("mxnet", "batch_size=4")])
def test_it_is_evaluated_whole(framework: str, other: str, trained: Path, hvdkit: Hvdkit, tmp_path: Path) -> None:
    """In batches of a size that the stages' microbatches do not divide, too."""
    done = hvdkit("evaluate", trained, "--framework", framework, other, "--out", "found")
    assert done.returncode == 0, done.stderr
    found, before = (
        json.loads(path.read_text()) for path in (tmp_path / "found/evaluate.json", trained / "result.json")
    )
    assert found["loss"] == pytest.approx(before["val_loss"], rel=1e-10)


def test_it_generates_the_same_text_in_two_frameworks(trained: Path, hvdkit: Hvdkit) -> None:
    asked = ("generate", trained, "--prompt", "the list", "--new-tokens", 20, "--framework")
    texts = [hvdkit(*asked, framework) for framework in ("pytorch", "mxnet")]
    assert not any(done.returncode for done in texts), [done.stderr for done in texts]
    assert texts[0].stdout.startswith("the list") and texts[0].stdout == texts[1].stdout


def test_it_is_exported_whole(trained: Path, hvdkit: Hvdkit, tmp_path: Path) -> None:
    done = hvdkit("export", trained, "--out", "model.safetensors")
    assert done.returncode == 0, done.stderr
    got, wanted = load_file(tmp_path / "model.safetensors"), load_file(trained / "checkpoints/last/model.safetensors")
    assert got.keys() == wanted.keys() and all(np.array_equal(got[name], wanted[name]) for name in wanted)


def test_it_continues_on_another_mesh(hvdkit: Hvdkit, tmp_path: Path) -> None:
    continues(hvdkit, "pytorch", DIVIDED, tmp_path)


def test_an_evaluation_in_parts_is_refused(trained: Path, inside: Hvdkit, tmp_path: Path) -> None:
    done = inside("evaluate", trained, "-np", 2, "parallel.tensor=2", "--out", "found")
    assert (done.returncode, (tmp_path / "found").exists()) == (2, False)
    assert done.stderr.startswith("parallel: hvdkit evaluate does not know models that are divided over ranks yet")
