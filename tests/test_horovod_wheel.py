"""`hvdkit horovod wheel`: the wheel is proved in the environment that it is for, and nothing there is changed."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hvdkit.commands import horovod_wheel as horovod
from hvdkit.commands.horovod_wheel import HorovodWheelRequest
from hvdkit.errors import RunError
from hvdkit.runtimes import store, wheel
from hvdkit.runtimes.target import Target

pytestmark = pytest.mark.long

RUNTIME = "mxnet"  # the quickest to start; its wheel is in the cache since `hvdkit runtime build`


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_a_wheel_is_proved_and_its_environment_stays_as_it_is(tmp_path: Path, hvdkit: Any) -> None:
    python = store.find(RUNTIME).python
    before = files(python.parent.parent)
    done = hvdkit("horovod", "wheel", "--python", python, "--cpu", "--out", tmp_path / "out", timeout=300)
    assert done.returncode == 0, done.stderr
    made = next((tmp_path / "out").iterdir())
    assert made.name.startswith("horovod-0.28.1-cp311") and done.stdout.splitlines() == [
        str(made),
        f"install it: {python} -m pip install {made}",
    ]
    assert "mxnet 1.9.1" in done.stderr and "testing it on 2 processes" in done.stderr
    assert files(python.parent.parent) == before


def test_a_proof_that_finds_a_wrong_result_fails_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The proof's own allreduce is replaced by one that is wrong in one element of one rank."""
    whole, right = horovod._PROOF.read_text(encoding="utf-8"), "array, expected = self._get(got),"
    wrong = "got = self._get(got) + (name == 'proof.int64.max' and self.rank == 1)\n        array, expected = got,"
    assert whole.count(right) == 1
    broken = tmp_path / "proof.py"
    broken.write_text(whole.replace(right, wrong), encoding="utf-8")
    monkeypatch.setattr(horovod, "_PROOF", broken)
    with pytest.raises(RunError, match=r"(?s)rank 1.*proof\.int64\.max on rank 1 gave .*must not be used"):
        horovod.run(HorovodWheelRequest(python=store.find(RUNTIME).python, gpu=False, out=tmp_path / "out"))
    assert list((tmp_path / "out").iterdir()) == []


def test_a_proof_that_hangs_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "proof.py"
    hanging.write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(horovod, "_PROOF", hanging)
    monkeypatch.setattr(horovod, "_PROOF_TIMEOUT_S", 2)
    with pytest.raises(RunError, match=r"the test of horovod\.mxnet did not end within 2 s"):
        horovod.run(HorovodWheelRequest(python=store.find(RUNTIME).python, gpu=False, out=tmp_path / "out"))


def test_an_out_that_cannot_be_made_is_refused_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hvdkit: Any
) -> None:
    (tmp_path / "file").touch()
    done = hvdkit("horovod", "wheel", "--python", store.find(RUNTIME).python, "--out", tmp_path / "file" / "out")
    assert done.returncode == 2 and "Not a directory; name a folder that can be made" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("cached", "expected"), [(True, "Horovod is in the cache, compiled"), (False, "compiling Horovod")]
)
def test_what_is_cached_is_not_announced_as_compiled_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: bool, expected: str
) -> None:
    made, said = tmp_path / "horovod.whl", StringIO()
    monkeypatch.setattr(wheel, "cached", lambda target: made if cached else None)
    monkeypatch.setattr(wheel, "obtain", lambda *arguments: made)
    monkeypatch.setattr(horovod, "prove", lambda *arguments: None)
    assert horovod.proved(Target(None, {"mxnet": "1.9.1"}, gpu=False), Console(file=said, width=200)) == made
    assert f"horovod: {expected}" in said.getvalue().splitlines()[0]
