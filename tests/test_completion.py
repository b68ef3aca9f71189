"""What a shell is given for TAB, as typer's scripts ask for it."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest
from conftest import ROOT, Hvdkit, run

from hvdkit.cli import app

HVDKIT = "import sys; sys.argv[0] = 'hvdkit'; from hvdkit.__main__ import main; main()"
RECIPES = ["resnet20-digits", "resnet20-folder", "resnet50-imagenet", "resnet50-synthetic"]


@pytest.fixture(autouse=True)
def called_hvdkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is called pytest, and the variables by which shells ask have the name of the command."""
    monkeypatch.setattr(app, "app", partial(app.app, prog_name="hvdkit"))


def completed(inside: Hvdkit, line: str) -> list[str]:
    """What bash is given for the last word of a command line, which may be empty."""
    words = line.split(" ")
    done = inside(_HVDKIT_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(len(words) - 1))
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hvdkit pr", ["predict-images", "predict", "profile"]),
        ("hvdkit runtime ", ["build", "add", "list"]),
        ("hvdkit train --res", ["--resume"]),
        ("hvdkit train resnet5", RECIPES[2:]),
        ("hvdkit compare resnet20-digits --framework ", ["pytorch", "tensorflow", "keras", "mxnet"]),
        ("hvdkit compare resnet20-digits --framework k", ["keras"]),
        ("hvdkit train resnet20-digits --log ", ["wandb", "mlflow", "tensorboard"]),
        ("hvdkit train resnet20-digits --rival d", ["ddp"]),
        ("hvdkit train resnet20-digits --launcher h", ["horovodrun"]),
        ("hvdkit predict p.json --cluster st", ["starved-100mbit"]),
        ("hvdkit advise p.json --cluster aws-p2", ["aws-p2-8xlarge"]),
        ("hvdkit bench all", ["allreduce", "allgather", "alltoall"]),
        ("hvdkit recipes copy m", ["mxnet"]),
        ("hvdkit runtime build m", ["mxnet"]),
    ],
)
def test_words_are_completed(line: str, expected: list[str], inside: Hvdkit) -> None:
    assert completed(inside, line) == expected


def test_files_are_completed_beside_names(inside: Hvdkit, tmp_path: Path) -> None:
    (tmp_path / "resnet-mine.yaml").touch()
    (tmp_path / "notes.txt").touch()
    assert completed(inside, "hvdkit train ") == [*RECIPES, "resnet-mine.yaml"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "own.yaml").touch()
    assert completed(inside, "hvdkit train old/") == ["old/own.yaml"]
    assert completed(inside, "hvdkit predict p.json --cluster old/o") == ["old/own.yaml"]


def test_bash_takes_the_script_and_calls_hvdkit(tmp_path: Path) -> None:
    """`--show-completion` in a real bash, up to the words that TAB shows."""
    command = tmp_path / "hvdkit"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{HVDKIT}" "$@"\n')
    command.chmod(0o755)
    here = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    shown = run([str(command), "--show-completion", "bash"], timeout=60, env=here)
    assert shown.returncode == 0 and "complete -o default -F" in shown.stdout, shown.stderr
    script = shown.stdout + "COMP_WORDS=(hvdkit train res); COMP_CWORD=2; _hvdkit_completion hvdkit\n"
    script += 'echo "${COMPREPLY[@]}"\n'
    done = run(["bash", "--norc", "-c", script], timeout=60, env=here, cwd=tmp_path)
    assert done.stdout.split() == RECIPES, done.stderr


def test_help_names_the_option() -> None:
    done = run([sys.executable, "-m", "hvdkit", "--help"], timeout=60, cwd=ROOT)
    assert "--install-completion" in done.stdout
