"""Exported files hold the checkpoint's model: bit by bit as safetensors, with the same logits as a Keras archive."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from conftest import ROOT, Hvdkit, run
from safetensors.numpy import load_file

from hvdkit.commands import evaluate, export
from hvdkit.launch.placement import Placement
from hvdkit.results.evaluate import read_evaluation
from hvdkit.runtimes.store import find


def rank(framework: str, *arguments: Path) -> dict[str, Any]:
    """What tests/export_rank.py finds in the framework's runtime; the file of its answer is the third argument."""
    runtime = find(framework)
    command = [str(runtime.python), str(ROOT / "tests" / "export_rank.py"), framework, *map(str, arguments)]
    done = run(command, 120, env=os.environ | runtime.environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(arguments[2].read_text())
    return found


def test_safetensors_hold_the_checkpoints_network_and_serve_as_weights(
    checkpoint_40: Path, hvdkit: Hvdkit, tmp_path: Path
) -> None:
    done = hvdkit("export", checkpoint_40, "--out", "net.safetensors")
    assert done.returncode == 0 and "written to net.safetensors" in done.stdout, done.stderr
    got, kept = load_file(tmp_path / "net.safetensors"), load_file(checkpoint_40 / "model.safetensors")
    assert got.keys() == kept.keys() and len(got) > 100
    for name, value in kept.items():
        assert got[name].dtype == value.dtype and np.array_equal(got[name], value), name
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]
    for framework in ("pytorch", "mxnet"):
        done = hvdkit("evaluate", checkpoint_40, "--framework", framework, "--out", framework)
        assert done.returncode == 0, done.stderr
        expected = read_evaluation(tmp_path / framework / "evaluate.json").correct
        found = rank(framework, tmp_path / "net.safetensors", checkpoint_40, tmp_path / f"{framework}.json")
        assert found["correct"] == expected > 60


def test_a_keras_archive_gives_the_same_logits(checkpoint_40: Path, hvdkit: Hvdkit, tmp_path: Path) -> None:
    for name in ("net.keras", "net.safetensors"):
        done = hvdkit("export", checkpoint_40, "--out", name)
        assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.keras", "net.safetensors"]
    found = rank("keras", tmp_path / "net.safetensors", checkpoint_40, tmp_path / "found.json", tmp_path / "net.keras")
    assert found["error"] < 1e-6 and found["dtype"] == "float32"


def test_wrong_requests_are_lines_and_write_nothing(checkpoint_40: Path, hvdkit: Hvdkit, tmp_path: Path) -> None:
    (tmp_path / "there.safetensors").write_text("mine")
    (tmp_path / "folder.keras").mkdir()
    for arguments, part in (
        ((checkpoint_40, "--out", "net.onnx"), "--out net.onnx: expected a file that ends in .safetensors or .keras"),
        ((checkpoint_40, "--out", "there.safetensors"), "the file exists; add --overwrite"),
        ((checkpoint_40, "--out", "folder.keras"), "expected a file, got a folder"),
        ((checkpoint_40, "--out", "nowhere/net.keras"), "nowhere is no folder that can be written"),
        (("nothing", "--out", "net.keras"), "nothing/checkpoint.json: cannot be read"),
    ):
        done = hvdkit("export", *arguments)
        assert done.returncode == 2 and part in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder.keras", "there.safetensors"]
    assert (tmp_path / "there.safetensors").read_text() == "mine"
    done = hvdkit("export", checkpoint_40, "--out", "there.safetensors", "--overwrite")
    assert done.returncode == 0 and len(load_file(tmp_path / "there.safetensors")) > 100, done.stderr


def test_an_archive_that_cannot_be_made_leaves_the_old_file(
    checkpoint_40: Path, hvdkit: Hvdkit, tmp_path: Path
) -> None:
    """The recipe says another model than the weights are of."""
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in checkpoint_40.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    record = json.loads((broken / "checkpoint.json").read_text())
    record["recipe"]["model"]["name"] = "resnet32"
    (broken / "checkpoint.json").write_text(json.dumps(record))
    (tmp_path / "net.keras").write_text("mine")
    done = hvdkit("export", broken, "--out", "net.keras", "--overwrite")
    assert done.returncode == 2 and "is missing" in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert (tmp_path / "net.keras").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken", "net.keras"]


def test_how_many_ranks_have_trained_binds_nobody(checkpoint_40: Path, tmp_path: Path) -> None:
    elastic = tmp_path / "elastic"
    elastic.mkdir()
    for path in checkpoint_40.iterdir():
        (elastic / path.name).write_bytes(path.read_bytes())
    record = json.loads((elastic / "checkpoint.json").read_text())
    record["recipe"]["elastic"] = {"min_np": 2, "max_np": 4}
    (elastic / "checkpoint.json").write_text(json.dumps(record))
    assert export.plan(elastic, tmp_path / "net.keras", overwrite=False).plan
    assert evaluate.plan(elastic, [], "mxnet", Placement()).np == 1
