"""The folder of a run: one writer, whoever starts it, and earlier results until the new run has trained."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import hvdkit
from hvdkit import folder_lock, paths, replaced
from hvdkit.commands import train
from hvdkit.commands.checked_run import CheckedRun
from hvdkit.commands.removed import Removals
from hvdkit.errors import RequestError, RunError
from hvdkit.folder_lock import FolderLock
from hvdkit.recipe import schema
from hvdkit.runtimes.store import find
from tests import hygiene
from tests.conftest import ROOT
from tests.test_paths import content

CLAIMS = """
import sys, time
from pathlib import Path
from hvdkit import paths
with paths.claimed(Path(sys.argv[1]), overwrite=True) as folder:
    {body}
    print("ready", flush=True)
    time.sleep(600)
"""


def claiming(folder: Path, body: str = "pass") -> subprocess.Popen[str]:
    """Another process that has the folder and does not end by itself."""
    command = [sys.executable, "-c", CLAIMS.format(body=body), str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def killed(process: subprocess.Popen[str]) -> None:
    with process:
        process.send_signal(signal.SIGKILL)


def owner(**other: Any) -> str:
    """The content of a lock, by default of a process of another host."""
    here = {"host": "far", "pid": 7, "started": 1, "boot": "another", "pids": "pid:[1]", "since": "2026-01-01 10:00:00"}
    return json.dumps(here | other)


def test_the_second_writer_learns_who_the_first_one_is(tmp_path: Path) -> None:
    written(tmp_path / "run", OLD)
    process = claiming(tmp_path / "run")
    try:
        assert ".replaced/result.json" in content(paths.settled(tmp_path / "run")), "a command that reads leaves it"
        with pytest.raises(RequestError) as refusal, paths.claimed(tmp_path / "run", overwrite=True):
            pytest.fail("two runs could have the folder now")
    finally:
        killed(process)
    told = str(refusal.value)
    assert f"another run is writing there (process {process.pid} on " in told and ", since 20" in told
    with paths.claimed(tmp_path / "run", overwrite=True):
        pass
    assert content(tmp_path) == {"run/": ""}


def without_locks(*_: object) -> None:
    raise OSError(38, "Function not implemented")


def test_where_a_file_system_has_no_locks_the_process_that_is_named_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_lock, "_SETTLING_S", 0.0)
    process = claiming(tmp_path)
    monkeypatch.setattr(fcntl, "flock", without_locks)
    try:
        with pytest.raises(RequestError, match=f"process {process.pid} on "):
            FolderLock(tmp_path)
    finally:
        killed(process)
    FolderLock(tmp_path).release()
    # its number is another process's by now
    (tmp_path / ".lock").write_text(owner(boot=folder_lock._boot(), pids=folder_lock._pids(), pid=os.getpid()))
    FolderLock(tmp_path).release()
    assert content(tmp_path) == {}


@pytest.mark.parametrize("locks", [True, False])
def test_another_host_holds_the_folder_while_it_gives_signs_of_life(
    locks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lock of a file system that several hosts mount, and the lock of this machine before it was restarted."""
    if not locks:
        monkeypatch.setattr(fcntl, "flock", without_locks)
        monkeypatch.setattr(folder_lock, "_SETTLING_S", 0.0)
    lock = tmp_path / ".lock"
    lock.write_text(owner())
    with pytest.raises(RequestError, match=r"\(process 7 on far, since 2026-01-01 10:00:00\).*ends 60 s after"):
        FolderLock(tmp_path)
    assert lock.read_text() == owner(), "the refused one has changed it"
    os.utime(lock, (time.time() - 61, time.time() - 61))
    with FolderLock(tmp_path):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert len(capsys.readouterr().err.splitlines()) == 1 and content(tmp_path) == {}


@pytest.mark.parametrize("text", ["", "{", "[]", owner(host="\x1b]0;x\x07"), owner(pid="7 8"), "\0" * 9999])
def test_a_lock_that_names_nobody_is_of_a_dead_run(text: str, tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text(text)
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()


def test_a_writer_whose_lock_was_deleted_makes_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "BEAT_S", 0.05)
    with FolderLock(tmp_path):
        (tmp_path / ".lock").unlink()
        deadline = time.monotonic() + hygiene.patience(10)
        while not (tmp_path / ".lock").exists() or not (tmp_path / ".lock").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(RequestError, match=f"process {os.getpid()} on"):
            FolderLock(tmp_path)
    assert content(tmp_path) == {}


OLD = {"result.json": "{}", "checkpoints/": "", "checkpoints/step-1/": "", "checkpoints/step-1/model": "w", "logs/": ""}
STARTED = {"config.yaml": "new", "logs/log": "new", "metrics.jsonl": "{}", "checkpoints/.step-2.making/model": ""}


def written(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(text)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), RunError("lost"), RequestError("wrong"), SystemExit(1)])
def test_whatever_ends_a_run_before_its_first_checkpoint_the_earlier_results_come_back(
    end: BaseException, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, OLD)
    with pytest.raises(type(end)), paths.claimed(tmp_path, overwrite=True) as place:
        written(place, STARTED)
        raise end
    assert content(tmp_path) == OLD and "the earlier files are back" in capsys.readouterr().err


@pytest.mark.parametrize("result", ["checkpoints/step-2/model", "runs/pytorch-np1-1/result.json", "compare.json"])
def test_earlier_results_go_as_soon_as_there_is_a_new_one(result: str, tmp_path: Path) -> None:
    written(tmp_path, OLD)
    with pytest.raises(KeyboardInterrupt), paths.claimed(tmp_path, overwrite=True) as place:
        written(place, STARTED)
        assert content(place / ".replaced") == OLD
        written(place, {result: "new"})
        deadline = time.monotonic() + hygiene.patience(20)
        while (place / ".replaced").exists():
            assert time.monotonic() < deadline, "a disk has to hold both until the run ends"
            time.sleep(0.02)
        raise KeyboardInterrupt
    assert content(tmp_path).items() >= (STARTED | {result: "new"}).items() and "step-1" not in str(content(tmp_path))


def test_the_next_command_finishes_what_kill_9_has_left(tmp_path: Path) -> None:
    written(tmp_path, OLD)
    killed(claiming(tmp_path, "(folder / 'config.yaml').write_text('new')"))
    assert "result.json" not in content(tmp_path)
    with pytest.raises(RequestError, match="kept no checkpoint"):  # none with a record
        hvdkit.export(tmp_path, tmp_path.parent / "w.safetensors")
    assert content(tmp_path) == OLD, "a command that reads"
    killed(claiming(tmp_path, "(folder / 'config.yaml').write_text('new')"))
    with pytest.raises(RequestError, match="not empty"), paths.claimed(tmp_path, overwrite=False):
        pytest.fail("it would be lost")
    with paths.claimed(tmp_path, overwrite=False, resume=True) as place:
        assert content(place).items() > OLD.items()
    killed(claiming(tmp_path, "(folder / 'result.json').write_text('new')"))
    with paths.claimed(tmp_path, overwrite=False, resume=True):
        pass
    assert content(tmp_path) == {"result.json": "new"}, "it had trained"


def rename_at(count: int) -> Callable[[Path, Path], Path]:
    """`Path.rename` that ends the process, as a SIGKILL does, at its call number `count`."""
    sound, calls = Path.rename, iter(range(count))

    def rename(self: Path, target: Path) -> Path:
        if next(calls, None) is None:
            raise Killed
        return sound(self, target)

    return rename


class Killed(BaseException):
    """Stands for SIGKILL where nothing catches it."""


@pytest.mark.parametrize("moves", range(8))
def test_no_moment_of_a_kill_while_files_are_moved_loses_one(moves: int, tmp_path: Path) -> None:
    written(tmp_path, OLD)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "rename", rename_at(moves))
            replaced.set_aside(tmp_path, tmp_path, paths.ours(tmp_path))
            written(tmp_path, STARTED)
            replaced.given_back(tmp_path, paths.ours)
    except Killed:
        assert content(tmp_path) != OLD or moves == 0
    paths.settled(tmp_path)
    assert content(tmp_path) == OLD


SCRIPT = ["recipes/pytorch/resnet.py", "recipes/resnet20-digits.yaml", "model.name=resnet8"]


def test_a_recipes_script_takes_the_lock_too(tmp_path: Path) -> None:
    runtime = find("pytorch")
    environment = {name: value for name, value in os.environ.items() if name != "HVDKIT_LAUNCHER"}
    environment |= runtime.environment | {"OMP_NUM_THREADS": "1"}

    def script(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(runtime.python), *SCRIPT, "--out", str(tmp_path), *words]
        return subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=hygiene.patience(120)
        )

    process = claiming(tmp_path)
    try:
        done = script("steps=1")
    finally:
        killed(process)
    assert done.returncode == 2 and f"another run is writing there (process {process.pid} on" in done.stderr
    assert not (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "checkpoints").exists()
    done = script("steps=1")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "result.json").exists() and not (tmp_path / ".lock").exists()


def test_what_is_removed_under_a_run_is_said_once_and_made_again(tmp_path: Path) -> None:
    folder, said = tmp_path / "run", list[str]()
    written(folder, {"logs/rank-0.log": "", "config.yaml": "name: a", "checkpoints/": ""})
    removals = Removals(folder, said.append, "it is", "name: a")

    def looked() -> list[str]:
        said.clear()
        for _ in range(3):
            removals._next = 0.0
            removals.look()
        return said

    assert looked() == []
    shutil.rmtree(folder / "logs")
    assert [text.partition(":")[0] for text in looked()] == [str(folder / "logs")] and (folder / "logs").is_dir()
    shutil.rmtree(folder / "checkpoints")
    (folder / "config.yaml").unlink()
    assert len(looked()) == 2 and (folder / "config.yaml").read_text() == "name: a"
    (folder / "checkpoints").mkdir()
    assert looked() == []
    folder.rename(tmp_path / "other")
    assert len(looked()) == 1 and "the checkpoints so far are not in it" in said[0]
    assert content(folder) == {"logs/": "", "config.yaml": "name: a"}


def resumed(folder: Path, trains: Callable[[], None], end: BaseException) -> None:
    """`hvdkit train --resume` for more epochs, whose ranks do this and end so."""

    def launch(*_: Any) -> None:
        assert not (folder / "result.json").exists(), "a rank that is done writes it"
        trains()
        raise end

    recipe = schema.load(ROOT / "recipes" / "resnet20-digits.yaml", ["epochs=9"])
    placement = SimpleNamespace(launcher="direct")
    plan = SimpleNamespace(recipe=recipe, framework="pytorch", np=1, rival=None, placement=placement)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(type(end)):
        patch.setattr(train, "launch", launch)
        patch.setattr(train.tune, "measured", lambda plan, _: plan)
        train.trained(cast("CheckedRun", plan), folder, resume=True)


@pytest.mark.parametrize("end", [KeyboardInterrupt(), RunError("lost"), RequestError("wrong")])
def test_a_resumed_run_that_trains_nothing_leaves_the_earlier_result(
    end: BaseException, tmp_path: Path, real: Path
) -> None:
    earlier = real / "runs" / "pytorch-np1"
    for name in ("config.yaml", "result.json", "metrics.jsonl"):
        shutil.copy(earlier / name, tmp_path / name)
    before = content(tmp_path)
    resumed(tmp_path, lambda: None, end)
    assert content(tmp_path) == before
    resumed(tmp_path, lambda: written(tmp_path, {"checkpoints/step-00000009/checkpoint.json": "{}"}), end)
    assert "result.json" not in content(tmp_path) and "epochs: 9" in content(tmp_path)["config.yaml"]
