"""A recipe's script by itself, under horovodrun or Python: its command line, and what it says at the end."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hvdkit.results.train import read_result
from tests.conftest import ROOT, run
from tests.resuming import local_recipe, local_run

pytestmark = pytest.mark.check

# A recipe's script

DIGITS = "resnet20-digits"
SCRIPT = [sys.executable, "-c", "import sys; from tests.local_adapter import Linear, adapter; "
          "from hvdkit.worker.entry import main; "
          "main(adapter, lambda table: Linear(3072, 10), sys.argv[1:])"]  # fmt: skip


def test_a_script_without_a_recipe_shows_its_whole_help() -> None:
    done = run([*SCRIPT, "--resume"], timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    for part in ("usage:", "Train one rank of a recipe", "RECIPE.yaml", "--rival", "expected a"):
        assert part in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([DIGITS, "--epochs", "3"], "--epochs: keys of the recipe are given as key=value, without dashes"),
        ([DIGITS, "--steps", "x"], "argument --steps: invalid int value: 'x'"),
        ([DIGITS, "epochs=x"], "command line: epochs: expected a whole number, got 'x'"),
        (["resnet20"], "unknown recipe 'resnet20': expected one of"),
        (["nowhere.yaml"], "nowhere.yaml: no such file"),
        ([DIGITS, "--out", "a/b"], "--out a/b: no such folder; make it with mkdir -p"),
        ([DIGITS, "--out", "file"], "--out file: is a file; expected a folder"),
    ],
)
def test_a_scripts_wrong_command_line_is_a_line(words: list[str], told: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = run([*SCRIPT, *words], timeout=60, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout) == (2, "") and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(f"error: {told}"), done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_script_takes_a_recipes_name(tmp_path: Path) -> None:
    """It reads the recipe, whose model this script's does not fit."""
    words = [DIGITS, "model.name=resnet8", "epochs=1", "steps=1"]
    done = run([*SCRIPT, *words], timeout=60, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert "tensor conv1.weight is unknown to this model" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("script", "lacks", "runtime"),
    [("pytorch", "torch", "pytorch"), ("keras", "tensorflow", "tensorflow"), ("mxnet", "mxnet", "mxnet")],
)
@pytest.mark.parametrize("by_hvdkit", [False, True])
def test_a_script_without_its_framework(script: str, lacks: str, runtime: str, by_hvdkit: bool, tmp_path: Path) -> None:
    path = ROOT / "recipes" / script / "resnet.py"
    code = f"import runpy, sys; sys.modules[{lacks!r}] = None; sys.argv[:] = [{str(path)!r}, {DIGITS!r}]; "
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    added = {"PYTHONPATH": str(ROOT), "HVDKIT_RUNTIMES": "/runtimes"} | ({"HVDKIT_RANK_DIR": "/"} if by_hvdkit else {})
    done = run([sys.executable, "-c", code], timeout=60, cwd=tmp_path, env=os.environ | added)
    if by_hvdkit:  # it reads Python's own message
        assert done.returncode == 1 and "\nModuleNotFoundError: " in done.stderr
        return
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(f"error: {path}: ") and f"in the interpreter {sys.executable}" in done.stderr
    remedy = f"start it with /runtimes/{runtime}/bin/python, which `hvdkit runtime build {runtime}` makes\n"
    assert done.stderr.endswith(remedy), done.stderr


def test_a_script_ends_with_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert local_run(None, local_recipe(epochs=1))
    (line,) = [each for each in capsys.readouterr().out.splitlines() if "images/s, step" in each]
    assert line.startswith("local ") and line.endswith("; --out FOLDER keeps all figures and the weights")
    assert local_run(tmp_path / "run", local_recipe(epochs=1))
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"all figures: {tmp_path / 'run' / 'result.json'}" and "{" not in out
    assert read_result(tmp_path / "run" / "result.json").framework == "local"
