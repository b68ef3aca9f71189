"""Folders that a command claims: one run at a time, and nobody else's files."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hvdkit
from hvdkit import paths
from hvdkit.errors import RequestError
from hvdkit.recipe import schema
from tests.conftest import ROOT, Hvdkit

pytestmark = pytest.mark.check


def test_a_lock_whose_file_has_gone_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run before ends, and takes its file away, between the opening of that file and its lock."""
    sound = fcntl.flock

    def flock(file: Any, operation: int) -> None:
        (tmp_path / ".lock").unlink()
        sound(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RequestError, match="another run is writing there"), paths.claimed(tmp_path, overwrite=False):
        pytest.fail("two runs could have the folder now")


def content(folder: Path) -> dict[str, str]:
    """The files below a folder, with their texts; folders end in a slash."""
    return {
        f"{path.relative_to(folder)}{'/' * path.is_dir()}": "" if path.is_dir() else path.read_text()
        for path in folder.rglob("*")
    }


def refused(folder: Path, written: dict[str, str], **options: bool) -> None:
    """A command writes these files into the folder, then finds that its request was wrong."""
    with (
        pytest.raises(RequestError, match="wrong"),
        paths.claimed(folder, **({"overwrite": False} | options)) as place,
    ):
        for name, text in written.items():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text(text)
        raise RequestError("wrong")


START = {"config.yaml": "name: a\n", "logs/rank-0.log": "error: wrong\n", "logs/exits.json": "[]", "metrics.jsonl": ""}


def test_a_refused_command_takes_back_the_folders_it_made(tmp_path: Path) -> None:
    refused(tmp_path / "runs" / "deep" / "a", START)
    assert content(tmp_path) == {}
    (tmp_path / "runs" / "there").mkdir(parents=True)
    refused(tmp_path / "runs" / "there", START)
    refused(tmp_path / "runs" / "new", START)
    refused(tmp_path / "runs" / "resumed", START, resume=True)
    assert content(tmp_path) == {"runs/": "", "runs/there/": ""}, "an empty folder that was there stays"


def test_what_a_resumed_run_has_stays(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("name: a\n")
    refused(tmp_path, {"logs/rank-0.log": "error"}, resume=True)
    assert content(tmp_path) == {"config.yaml": "name: a\n", "logs/": "", "logs/rank-0.log": "error"}


@pytest.mark.parametrize("result", ["metrics.jsonl", "runs/mxnet-np1/result.json", "checkpoints/step-1/a"])
def test_results_outlive_a_request_that_turns_out_wrong(result: str, tmp_path: Path) -> None:
    """Such as a corrupt image in the third epoch: what explains it stays, too."""
    refused(tmp_path / "run", START | {result: "1\n"})
    assert content(tmp_path / "run").items() >= (START | {result: "1\n"}).items()


def test_a_command_that_fails_keeps_its_logs_and_no_empty_folder(tmp_path: Path) -> None:
    for name, files in (("empty", []), ("run", ["config.yaml"])):
        with pytest.raises(KeyboardInterrupt), paths.claimed(tmp_path / name, overwrite=False) as place:
            for file in files:
                (place / file).write_text("name: a\n")
            raise KeyboardInterrupt
    assert content(tmp_path) == {"run/": "", "run/config.yaml": "name: a\n"}


@pytest.mark.parametrize("name", ["new\nline", "\x1b[2J", "a\tb", "\x9b31m"])
def test_a_folder_has_no_control_characters(name: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as refusal, paths.claimed(tmp_path / name, overwrite=False):
        pytest.fail("other programs read its name")
    assert str(refusal.value).isprintable() and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("flag", "reason"), [(0, "Permission denied"), (os.ST_RDONLY, "Read-only file system")])
def test_why_a_folder_cannot_be_written(
    flag: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # of root too
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_flag=flag))
    (tmp_path / "link").symlink_to("no/such/folder")
    with pytest.raises(RequestError, match="is a link to nothing"):
        paths.check_free(tmp_path / "link", overwrite=False)
    with pytest.raises(RequestError, match=rf"cannot be written \({reason}\); choose another folder"):
        paths.check_free(tmp_path / "run", overwrite=False)


def test_a_tilde_is_the_home_folder_in_every_option_and_key(
    inside: Hvdkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves it as it is after `=`, as in --out=~/run and data.path=~/photos."""
    home = tmp_path / "my home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    (home / "hosts").write_bytes("\ufefflocalhost slots=2 # here\r\n".encode())
    (home / "recipe.yaml").write_text((ROOT / "recipes" / "resnet20-digits.yaml").read_text())
    (home / "net.py").touch()
    done = inside("train", "~/recipe.yaml", "--out=~/run", "-H", "~/hosts", "-np", 2, "--dry-run")
    assert done.returncode == 0 and f"{home}/run" in done.stdout, done.stderr
    for key, told in (
        ("model.weights=~/w.safetensors", f"model.weights: {home}/w.safetensors: cannot be read"),
        ("data={name: imagefolder, path: ~/photos}", f"data.path: {home}/photos"),
        ("data={name: cifar10, path: ~/c}", f"{home}/c"),
        ("data={name: native, module: ~/pipe.py}", f"data.module: {home}/pipe.py: no such file"),
        ("--out=~nobody-here/run", "~nobody-here/run: there is no user 'nobody-here'"),
        ("--hosts=~/none", f"{home}/none: cannot be read"),
    ):
        done = inside("train", "~/recipe.yaml", key, "--framework", "pytorch", "--dry-run")
        assert done.returncode == 2 and told in done.stderr, done.stderr
    assert schema.load(home / "recipe.yaml", ["model={name: own, script: ~/net.py}"]).model.script == f"{home}/net.py"
    text = schema.load(ROOT / "recipes" / "gpt-tiny.yaml", ["data.path=~/a", "data.tokens=~/t.json"]).data
    assert (text.path, text.tokens) == (f"{home}/a", f"{home}/t.json")
    found = hvdkit.submit("~/recipe.yaml", script="~/job.sbatch", out="~/run")
    assert found.file == home / "job.sbatch" and f"--out '{home}/run'" in found.file.read_text()
    with pytest.raises(RequestError, match="there is no user 'nobody-here'"):
        hvdkit.submit("~/recipe.yaml", script="~nobody-here/w")
    assert not (tmp_path / "~").exists()
