"""What a shell is given for TAB, as typer's scripts ask for it."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time
from functools import partial
from pathlib import Path

import hygiene
import pytest
from conftest import ROOT, Hvdkit, run

from hvdkit.cli import app
from hvdkit.recipe import registry, schema
from hvdkit.recipe.hints import values

pytestmark = pytest.mark.check

HVDKIT = "import sys; sys.argv[0] = 'hvdkit'; from hvdkit.__main__ import main; main()"
RECIPES = ["gpt-tiny", "gpt2", "resnet20-digits", "resnet20-folder", "resnet50-imagenet", "resnet50-synthetic"]


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
        ("hvdkit train resnet5", RECIPES[4:]),
        ("hvdkit compare resnet20-digits --framework ", ["pytorch", "tensorflow", "keras", "mxnet"]),
        ("hvdkit compare resnet20-digits --framework k", ["keras"]),
        ("hvdkit train resnet20-digits --log ", ["wandb", "mlflow", "tensorboard"]),
        ("hvdkit train resnet20-digits --rival dd", ["ddp"]),
        ("hvdkit train resnet20-digits --launcher h", ["horovodrun"]),
        ("hvdkit predict p.json --cluster st", ["starved-100mbit"]),
        ("hvdkit advise p.json --cluster aws-p2", ["aws-p2-8xlarge"]),
        ("hvdkit bench all", ["allreduce", "allgather", "alltoall"]),
        ("hvdkit recipes copy m", ["mxnet"]),
        ("hvdkit train resnet20-digits optimizer.mom", ["optimizer.momentum=", "optimizer.momentum=0.9"]),
        ("hvdkit compare resnet20-digits device", ["device=", "device=auto", "device=cpu", "device=gpu"]),
        (
            "hvdkit evaluate run pre",
            ["precision=", *(f"precision=fp{bits}" for bits in (32, 64)), "precision=bf16", "precision=fp16"],
        ),
        (
            "hvdkit advise resnet20-digits epochs=3 checkp",
            [
                *("checkpoint.every_epochs=", "checkpoint.every_steps=", "checkpoint.keep="),
                "checkpoint.accept_changed_data=",
            ],
        ),
        ("hvdkit runtime build m", ["mxnet"]),
    ],
)
def test_words_are_completed(line: str, expected: list[str], inside: Hvdkit) -> None:
    assert completed(inside, line) == expected


def test_zsh_gets_whole_words(inside: Hvdkit) -> None:
    line = "hvdkit train resnet20-digits optimizer.name=l"
    done = inside(_HVDKIT_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=line)
    assert 'optimizer.name=lars"' in done.stdout and "lamb" in done.stdout and "adamw" not in done.stdout, done.stderr


def test_what_is_completed_is_accepted() -> None:
    """Each value of a key that has a list of them, and each default; a section's keys may need another choice."""
    for key, known in values(schema.Recipe).items():
        for value in known if "." not in key else []:
            assert schema.load(registry.locate(Path(RECIPES[2])), [f"{key}={value}"])


def test_tab_in_a_bash_with_a_terminal(tmp_path: Path) -> None:
    """The keys that a user presses, and the line that is there behind them."""
    command = tmp_path / "hvdkit"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{HVDKIT}" "$@"\n')
    command.chmod(0o755)
    here = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TERM": "dumb",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    (tmp_path / "script").write_text(run([str(command), "--show-completion", "bash"], timeout=60, env=here).stdout)
    (tmp_path / "my recipe.yaml").touch()
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        os.execvpe("bash", ["bash", "--norc", "-i"], here)
    try:
        os.write(terminal, b"PS1='> '; source ./script; echo rea''dy\n")
        assert "ready" in shown_until(terminal, "ready")
        for typed, expected in (
            ("hvdkit tra\t", "hvdkit train "),
            ("resnet20-d\t", "resnet20-digits "),
            ("optimizer.na\t", "me="),
            ("\x15hvdkit train resnet20-digits --framework k\t", "keras "),
            ("\x15hvdkit train my\t", "my\\ recipe.yaml "),
        ):
            os.write(terminal, typed.encode())
            assert expected in shown_until(terminal, expected), typed
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(terminal)


def shown_until(terminal: int, expected: str) -> str:
    """What a terminal shows until that, without the bell; for a minute at most."""
    shown, until = "", time.monotonic() + hygiene.patience(60)
    while expected not in shown and time.monotonic() < until:
        if select.select([terminal], [], [], 0.2)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace").replace("\a", "")
    return shown


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
    assert done.stdout.split() == RECIPES[2:], done.stderr


def test_help_names_the_option() -> None:
    done = run([sys.executable, "-m", "hvdkit", "--help"], timeout=60, cwd=ROOT)
    assert "--install-completion" in done.stdout
