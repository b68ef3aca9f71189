"""Where a command finds itself: names that no disk takes, links in circles, folders that are gone."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest

from hvdkit import files, paths
from hvdkit.cli import app
from hvdkit.commands import advise, export, predict
from hvdkit.errors import RequestError
from hvdkit.launch.hosts import is_this_machine
from hvdkit.recipe import registry, schema
from hvdkit.results import profile as profiles
from hvdkit.runtimes import store
from hvdkit.simulator import cluster as clusters
from tests import hygiene, simulating
from tests.conftest import Hvdkit

LONG = "x" * 300


@pytest.fixture(params=["long", "circle", "circle/below"])
def impossible(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path that the system refuses to look at, even root's, as it does others' where the permission is missing."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    return Path(LONG if request.param == "long" else request.param)


@pytest.mark.parametrize(
    "work",
    [
        lambda path: paths.check_free(path, overwrite=False),
        lambda path: schema.load(registry.locate(path)),
        clusters.load,
        predict.read,
        lambda path: advise.check(path / "new.yaml"),
        lambda path: export.plan(path, path / "model.safetensors", overwrite=False),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_refused_in_a_line(work: Callable[[Path], object], impossible: Path) -> None:
    with pytest.raises(RequestError) as refusal:
        work(impossible)
    assert all(str(impossible)[:20] in line for line in str(refusal.value).splitlines())


def test_runtimes_that_cannot_be_looked_at_are_broken(impossible: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDKIT_RUNTIMES", str(impossible))
    assert store.installed() == []
    with pytest.raises(RequestError, match="runtime 'mxnet', which is"):
        store.find("mxnet")


def test_a_copy_for_which_there_is_no_room_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(target: Path, text: str, encoding: str) -> None:
        target.write_bytes(b"# half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as there, pytest.raises(RequestError, match="No space left on device"):
        there.setattr(Path, "write_text", full)
        registry.copy("resnet20-digits", tmp_path)
    assert registry.copy("resnet20-digits", tmp_path).read_text().splitlines()[1].startswith("# ResNet-20")


def test_what_can_be_no_name_is_no_machine() -> None:
    for name in ("x" * 64, "a..b", "x" * 253):
        assert not is_this_machine(name)


def test_a_recipe_to_be_written_needs_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no folder that can be written"):
        advise.check(tmp_path / "nowhere" / "new.yaml")
    (tmp_path / "there.yaml").symlink_to("nowhere")
    with pytest.raises(RequestError, match="is there already"):
        advise.check(tmp_path / "there.yaml")
    advise.check(tmp_path / "new.yaml")


@pytest.mark.parametrize(
    ("refusal", "told"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "some/file"), "some/file: No space left on device\n"),
        (OSError("what a library says"), "what a library says\n"),
    ],
)
def test_what_nobody_foresaw_of_the_machine_is_a_line_too(
    refusal: OSError, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hvdkit", "recipes", "list"])
    monkeypatch.setattr("hvdkit.recipe.registry.entries", mock.Mock(side_effect=refusal))
    with pytest.raises(SystemExit) as end:
        app.main()
    assert end.value.code == 1 and capsys.readouterr().err == told


def test_a_users_modules_are_not_taken_for_the_agents(tmp_path: Path) -> None:
    for name in ("process_tree", "link_monitor", "interfaces", "task", "watchdog", "reports"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('this is the user's')\n")
    code = "import hvdkit.launch.agents, hvdkit.launch.agent.rank_agent"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=hygiene.patience(30)
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("ending", [KeyboardInterrupt, SystemExit])
def test_a_file_whose_writing_is_interrupted_leaves_nothing(
    ending: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", mock.Mock(side_effect=ending))
    with pytest.raises(ending):
        files.write_atomic(tmp_path / "predict.json", "{}")
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_cannot_be_written_is_no_news_in_each_picture(tmp_path: Path) -> None:
    (tmp_path / "file").touch()  # no folder can be made below it, not even by root
    code = "from hvdkit.report import canvas\nwith canvas.drawing(100.0): pass"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=hygiene.patience(60),
        env=os.environ | {"MPLCONFIGDIR": str(tmp_path / "file" / "below")},
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", ["predict", "advise"])
def test_overwrite_does_not_remove_what_the_command_was_given(command: str, inside: Hvdkit, tmp_path: Path) -> None:
    (tmp_path / "measured").mkdir()
    (tmp_path / "links").symlink_to("measured")
    profiles.save(simulating.profile(), tmp_path / "measured" / "profile.json")
    done = inside(
        command, "links/profile.json", "--cluster", "h200-nvlink-ib", "-n", 2, "--out", "measured", "--overwrite"
    )
    assert done.returncode == 2
    assert done.stderr == "--out measured: --overwrite would remove links/profile.json; choose another folder\n"
    assert (tmp_path / "measured" / "profile.json").exists()


def test_overwrite_takes_an_input_beside_the_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "predict.json").touch()
    (tmp_path / "out-profile.json").touch()
    inputs = [tmp_path / "out-profile.json", None, tmp_path / "out" / "not-there"]
    paths.check_free(tmp_path / "out", overwrite=True, inputs=inputs)
    for given in (tmp_path / "out", tmp_path / "out" / ".." / "out" / "predict.json"):
        with pytest.raises(RequestError, match="--overwrite would remove"):
            paths.check_free(tmp_path / "out", overwrite=True, inputs=[given])
        paths.check_free(tmp_path / "out", overwrite=False, resume=True, inputs=[given])
