"""What a shell is given for TAB, as typer's scripts ask for it: commands and options; values are the shell's."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

import pytest

from hvdkit.cli import app
from tests.conftest import Hvdkit, run

pytestmark = pytest.mark.check

HVDKIT = "import sys; sys.argv[0] = 'hvdkit'; from hvdkit.__main__ import main; main()"


@pytest.fixture(autouse=True)
def called_hvdkit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is called pytest, and the variables by which shells ask have the name of the command."""
    monkeypatch.setattr(app, "app", partial(app.app, prog_name="hvdkit"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("hvdkit pr", ["predict-images", "predict", "profile"]),
        ("hvdkit runtime ", ["build", "add", "list"]),
        ("hvdkit train --res", ["--resume"]),
        ("hvdkit runtime add --b", ["--build"]),
        ("hvdkit train resnet", []),
    ],
)
def test_words_are_completed(line: str, expected: list[str], inside: Hvdkit) -> None:
    done = inside(_HVDKIT_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=str(line.count(" ")))
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", expected)


def test_bash_takes_the_script_and_calls_hvdkit(tmp_path: Path) -> None:
    """`--show-completion` in a real bash, up to the words that TAB shows; elsewhere it completes files."""
    command = tmp_path / "hvdkit"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{HVDKIT}" "$@"\n')
    command.chmod(0o755)
    here = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    shown = run([str(command), "--show-completion", "bash"], timeout=60, env=here)
    assert shown.returncode == 0 and "complete -o default -F" in shown.stdout, shown.stderr
    script = shown.stdout + "COMP_WORDS=(hvdkit train --ov); COMP_CWORD=2; _hvdkit_completion hvdkit\n"
    done = run(["bash", "--norc", "-c", script + 'echo "${COMPREPLY[@]}"\n'], timeout=60, env=here, cwd=tmp_path)
    assert done.stdout.split() == ["--overwrite"], done.stderr
