"""scripts/bootstrap.py makes the environment of the command line; `make help`."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

BOOTSTRAP = ROOT / "scripts" / "bootstrap.py"


def test_bootstrap_tells_all_that_is_missing_at_once(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CXX"} | {"PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, BOOTSTRAP], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert "sudo apt-get install g++" in done.stderr
    assert "sudo apt-get install make" in done.stderr
    assert "Traceback" not in done.stderr


def _checkout(folder: Path) -> Path:
    """A checkout of which bootstrap.py sees all that it asks for; its path."""
    for name in ("setup.cfg", "pyproject.toml"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "scripts").mkdir()
    (folder / "hvdkit").symlink_to(ROOT / "hvdkit")
    return Path(shutil.copy(BOOTSTRAP, folder / "scripts" / "bootstrap.py"))


def test_bootstrap_takes_no_half_made_environment_for_whole(tmp_path: Path) -> None:
    """A checkout whose .venv lacks its marker, then one whose marker is from another setup.cfg."""
    bootstrap = _checkout(tmp_path)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("python", "hvdkit"):
        (tmp_path / ".venv" / "bin" / name).symlink_to(sys.executable)

    def ask(question: str) -> str:
        command = [sys.executable, "-c", f"import bootstrap; print({question})"]
        done = subprocess.run(command, cwd=tmp_path / "scripts", capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert ask("bootstrap.whole()") == "False"
    ask("bootstrap.MARKER.write_text(bootstrap.fingerprint('driver'))")
    assert ask("bootstrap.whole('driver'), bootstrap.whole()") == "True False", "the tools are missing"
    ask("bootstrap.MARKER.write_text(bootstrap.fingerprint())")
    assert ask("bootstrap.whole('driver'), bootstrap.whole()") == "True True"
    for options in ([], ["--driver"]):
        done = subprocess.run([sys.executable, bootstrap, *options], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == ("", ""), "there was nothing to do"
    with (tmp_path / "setup.cfg").open("a") as file:
        file.write("# another line\n")
    assert ask("bootstrap.whole('driver'), bootstrap.whole()") == "False False"


def _with_pip(folder: Path, does: str) -> dict[str, str]:
    """An environment in which `python -m venv` makes a .venv whose pip does that; `does` is Python."""
    (folder / "fake" / "venv").mkdir(parents=True)
    python = f'#!/bin/sh\nexec {sys.executable} {folder / "fake" / "pip.py"} "$@"\n'
    (folder / "fake" / "pip.py").write_text(f"import sys\n{does}\n")
    (folder / "fake" / "venv" / "__init__.py").write_text("")
    (folder / "fake" / "venv" / "__main__.py").write_text(
        "import pathlib, sys\n"
        "place = pathlib.Path(sys.argv[1]) / 'bin'\n"
        "place.mkdir(parents=True)\n"
        "for name in ('python', 'hvdkit'):\n"
        f"    (place / name).write_text({python!r})\n"
        "    (place / name).chmod(0o755)\n"
    )
    return os.environ | {"PYTHONPATH": str(folder / "fake")}


def test_bootstrap_shows_a_line_a_stage_and_is_quiet_otherwise(tmp_path: Path) -> None:
    bootstrap = _checkout(tmp_path)
    environment = _with_pip(tmp_path, f"open({str(tmp_path / 'asked')!r}, 'a').write(' '.join(sys.argv) + '\\n')")

    def run(*options: str) -> list[str]:
        command = [sys.executable, bootstrap, *options]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stderr == ""
        return [re.sub(r"\d+", "N", line) for line in done.stdout.splitlines()]

    empty = "making the driver environment .venv (about N s left)"
    assert run("--driver") == [empty, "installing the command line into .venv (about N s left)"]
    assert run("--driver") == []
    tools = "installing the command line and the tools of its tests into .venv (about N s left)"
    assert run() == [tools], "what is there is added to"
    assert run() == run("--driver") == []
    (tmp_path / ".venv" / "made-from").unlink()
    assert run() == [empty, tools], "a half-made one is made anew"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in asked] == [".", ".[dev]", ".[dev]"]
    assert all(" -qq " in line for line in asked)


def test_bootstrap_shows_why_pip_failed(tmp_path: Path) -> None:
    bootstrap = _checkout(tmp_path)
    fails = "print('ERROR: no such package', file=sys.stderr); raise SystemExit(7)"
    done = subprocess.run(
        [sys.executable, bootstrap, "--driver"], env=_with_pip(tmp_path, fails), capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "ERROR: no such package\nmaking .venv failed (exit status 7)\n")
    assert not (tmp_path / ".venv" / "made-from").exists()
