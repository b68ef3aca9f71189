"""`hvdkit horovod wheel`: the wheel is proved in the environment that it is for, and nothing there is changed."""

from __future__ import annotations

import json
import sys
import zipfile
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from hvdkit import __version__
from hvdkit.commands import horovod_wheel as horovod
from hvdkit.commands.horovod_wheel import HorovodWheelRequest
from hvdkit.errors import RequestError, RunError
from hvdkit.runtimes import machine, pins, store, wheel
from hvdkit.runtimes.target import Target
from tests.conftest import run

pytestmark = pytest.mark.long

TORCH = {"torch": "2.13.0+cpu", "numpy": "2.4.6"}
RUNTIME = "mxnet"  # the quickest to start; its wheel is in the cache since `hvdkit runtime build`


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_a_wheel_is_proved_and_its_environment_stays_as_it_is(tmp_path: Path, hvdkit: Any) -> None:
    python = store.find(RUNTIME).python
    before = files(python.parent.parent)
    done = hvdkit("horovod", "wheel", "--python", python, "--cpu", "--out", tmp_path / "out", timeout=300)
    assert done.returncode == 0, done.stderr
    made = next((tmp_path / "out").iterdir())
    assert made.name.startswith(
        f"horovod-0.28.1+mxnet1.9.1.hvdkit{__version__}-cp311"
    ) and done.stdout.splitlines() == [
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


@pytest.fixture
def built(tmp_path: Path) -> Path:
    """What a build for torch leaves in the cache, with two files in place of a thousand."""
    folder = tmp_path / "cache"
    folder.mkdir()
    target = Target(machine.python_for("pytorch"), TORCH)
    (folder / "made-from.json").write_text(json.dumps(wheel.wheel_ingredients(target), default=str))
    made = folder / "horovod-0.28.1-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        about = "horovod-0.28.1.dist-info/"
        archive.writestr("horovod/__init__.py", "__version__ = '0.28.1'\n")
        archive.writestr(f"{about}METADATA", "Metadata-Version: 2.1\nName: horovod\nVersion: 0.28.1\nLicense: 0.28.1\n")
        archive.writestr(f"{about}WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}RECORD", "horovod/__init__.py,,\n")
    return made


def test_pip_takes_each_framework_s_wheel_from_one_folder(built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    folder.mkdir()
    for versions in (TORCH, {"mxnet": "1.9.1", "numpy": "1.23.5"}):
        wheel.publish(built, Target(None, versions), folder)
    for asked, version in (
        ("horovod", f"0.28.1+torch2.13.0.hvdkit{__version__}"),
        (f"horovod==0.28.1+mxnet1.9.1.hvdkit{__version__}", f"0.28.1+mxnet1.9.1.hvdkit{__version__}"),
    ):
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--find-links",
            str(folder),
        ]
        done = run([*pip, "--target", str(tmp_path / version), asked], 60)
        assert done.returncode == 0, done.stderr
        about = tmp_path / version / f"horovod-{version}.dist-info"
        assert f"\nVersion: {version}\nLicense: 0.28.1\n" in (about / "METADATA").read_text()
        assert "made-from.json" in (about / "RECORD").read_text(), "so that pip removes it too"


def test_a_runtime_takes_a_wheel_that_was_built_for_it_alone(
    built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = wheel.publish(built, Target(None, TORCH), tmp_path)
    assert wheel.published("pytorch", False, tmp_path) == made
    monkeypatch.setattr(machine, "compiler", lambda: "another")
    monkeypatch.setattr(machine, "architecture", lambda: "x86_64 avx f16c fma avx512")
    assert wheel.published("pytorch", False, tmp_path) == made, "a machine with more than it needs takes it"
    with pytest.raises(
        RequestError, match=r"runtime 'mxnet' .*, found none; make one with `hvdkit horovod wheel mxnet"
    ):
        wheel.published("mxnet", False, tmp_path)
    for what, spoil in {
        "architecture": lambda: monkeypatch.setattr(machine, "architecture", lambda: "x86_64"),
        "mpi": lambda: monkeypatch.setattr(machine, "mpi", lambda: "mpirun (Open MPI) 99"),
        "python": lambda: monkeypatch.setattr(machine, "python_abi", lambda python: "3.99 cpython-399"),
        "patches": lambda: monkeypatch.setattr(wheel.patches, "fingerprint", lambda patches: "other"),
        "framework": lambda: monkeypatch.setattr(pins.Pins, "version", lambda self, gpu: "2.14.0"),
    }.items():
        spoil()
        with pytest.raises(RequestError, match=rf"found none; {made.name.replace('+', '.')} differs in .*{what}"):
            wheel.published("pytorch", False, tmp_path)
    made.write_bytes(b"PK")
    with pytest.raises(RequestError, match=r"--find-links: .*\.whl cannot be read .*; fetch it again"):
        wheel.published("pytorch", False, tmp_path)


def test_wheels_for_runtimes_want_runtimes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inside: Any) -> None:
    monkeypatch.setenv("HVDKIT_RUNTIMES", str(tmp_path / "none"))
    done = inside("horovod", "wheel", "--out", tmp_path)
    assert (done.returncode, "no runtime is built; run `hvdkit runtime build`" in done.stderr) == (2, True)
    done = inside("horovod", "wheel", "pytorch", "--python", sys.executable, "--out", tmp_path)
    assert (done.returncode, "expected one of them, got both" in done.stderr) == (2, True)
    done = inside("runtime", "build", "mxnet", "--cpu", "--find-links", tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not (tmp_path / "none" / "mxnet").exists()
    assert f"--find-links {tmp_path}: expected a wheel of Horovod for the runtime 'mxnet'" in done.stderr
