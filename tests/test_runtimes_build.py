"""The parts that a build is made of: its processes, its proof, and the bootstrap of the driver environment."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdkit.commands.runtime_build import prove
from hvdkit.core.group import Group
from hvdkit.errors import RunError
from hvdkit.runtimes import environment, patches, pins, store, target, wheel
from hvdkit.runtimes.process import BuildLog, Cancellation, Output
from hvdkit.runtimes.target import Target
from hvdkit.worker import proof
from tests import hygiene
from tests.conftest import rest_thorough

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parent.parent
BOOTSTRAP = ROOT / "scripts" / "bootstrap.py"

# A command that starts a child of its own, tells its process id and stays.
_STAYS = (
    "import subprocess, sys, time; child = subprocess.Popen(['sleep', '3600']); "
    "print(child.pid, flush=True); time.sleep(3600)"
)


def _gone(pid: int, within_s: float = 60) -> bool:
    deadline = time.monotonic() + hygiene.patience(within_s)
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_commands_output_goes_to_the_log_and_line_by_line_to_the_listener(tmp_path: Path) -> None:
    log = BuildLog(tmp_path / "build.log", Cancellation())
    heard: list[str] = []
    log.run("a test", [sys.executable, "-c", "print('[ 42%] Building'); print('done')"], on_line=heard.append)
    log.close()
    assert heard == ["[ 42%] Building\n", "done\n"]
    assert (tmp_path / "build.log").read_text().endswith("[ 42%] Building\ndone\n")


def test_a_failed_command_is_told_with_stage_status_log_and_its_first_error(tmp_path: Path) -> None:
    log = BuildLog(tmp_path / "build.log", Cancellation())
    noise = "print('fine'); print('x.cc:1: error: no such thing'); [print('later', i) for i in range(50)]; exit(7)"
    with pytest.raises(RunError) as caught:
        log.run("compiling Horovod", [sys.executable, "-c", noise])
    message = str(caught.value)
    assert message.startswith(f"compiling Horovod failed (exit status 7); the whole log: {tmp_path / 'build.log'}")
    assert "x.cc:1: error: no such thing" in message
    assert "fine" not in message
    assert len(message.splitlines()) < 20


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ("OSError: [Errno 28] No space left on device", "the disk is full; free space, or name folders with more in "),
        ("c++: fatal error: Killed signal terminated program cc1plus", "the compiler was killed, as a rule for lack"),
        ("nvcc error   : 'cicc' died due to signal 9 (Kill signal)", "the compiler was killed, as a rule for lack of"),
        ("gmake[2]: *** [build.make:79: unity_1.o] Error 137", "the compiler was killed, as a rule for lack of"),
    ],
)
def test_a_full_disk_and_a_killed_compiler_are_one_line_with_the_remedy(tmp_path: Path, said: str, cause: str) -> None:
    log = BuildLog(tmp_path / "build.log", Cancellation())
    with pytest.raises(RunError) as caught:
        log.run("compiling Horovod", [sys.executable, "-c", f"print({said!r}); print('later'); exit(1)"])
    message = str(caught.value)
    assert message.startswith(f"compiling Horovod failed: {cause}")
    assert message.endswith(f"; the whole log: {tmp_path / 'build.log'}") and len(message.splitlines()) == 1


def test_a_log_on_a_full_disk_stops_no_build(tmp_path: Path) -> None:
    lines: list[str] = []
    command = [sys.executable, "-c", "print('x' * 10**6); print('y')"]
    with BuildLog(Path("/dev/full"), Cancellation()) as log:
        log.write("a line")
        log.run("a test", command, on_line=lines.append)
    assert lines[-1] == "y\n"
    (tmp_path / "file").touch()
    with pytest.raises(
        RunError, match=r"file.*: cannot be written \((Not a directory|File exists)\); set HVDKIT_RUNTIMES"
    ):
        BuildLog(tmp_path / "file" / "build.log", Cancellation())


# Pip's own summary of a build that failed, below the output of the build.
_PIP_SUMMARY = """  error: subprocess-exited-with-error

  note: This error originates from a subprocess, and is likely not a problem with pip.
  full command: python -u -c '
  # - It provides a clear error message when setuptools is not installed.
"""


@pytest.mark.parametrize(
    "first",
    [
        "  horovod/common/logging.h:49:3: error: there are no arguments to 'LogMessageFatal'",
        "  mpi_ops.cc:12:10: fatal error: xla/client.h: No such file or directory",
        '  kernels.cu(12): error: identifier "x" is undefined',
        "nvcc fatal   : Unsupported gpu architecture 'compute_35'",
        "/usr/bin/ld: cannot find -lnccl: No such file or directory",
        "  mpi_ops.cc:(.text+0x9): undefined reference to `horovod_rank'",
        "  CMake Error at CMakeLists.txt:12 (find_package):",
        "  cc1plus: error: unrecognized command-line option '-std=c++99'",
    ],
)
def test_the_first_error_of_a_compiler_is_shown_before_pips_summary(first: str) -> None:
    shown = _shown(["fine"] * 1000, [first], ["a later error: of another source"] * 1000, _PIP_SUMMARY.splitlines())
    assert shown[0] == first and len(shown) < 20
    assert _shown(["fine"] * 1000, _PIP_SUMMARY.splitlines())[0] == "  error: subprocess-exited-with-error"


def test_without_an_error_line_the_last_lines_are_the_relevant_ones() -> None:
    shown = _shown([f"line {number}" for number in range(100)], [""])
    assert shown[-1] == "line 99" and len(shown) < 20


def _shown(*parts: list[str]) -> list[str]:
    output = Output()
    for part in parts:
        for line in part:
            output.add(line + "\n")
    return output.relevant()


def test_cancelling_ends_a_command_and_all_that_it_started(tmp_path: Path) -> None:
    cancelled = Cancellation()
    pids: list[int] = []

    def on_line(line: str) -> None:
        pids.append(int(line))
        cancelled.set()

    with pytest.raises(RunError, match="cancelled"):
        BuildLog(tmp_path / "log", cancelled).run("a test", [sys.executable, "-c", _STAYS], on_line=on_line)
    assert _gone(pids[0])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_build_that_is_ended_ends_at_once_and_leaves_no_process_behind(tmp_path: Path, number: int) -> None:
    script = (
        "import sys; from pathlib import Path; from hvdkit.runtimes.process import BuildLog, Cancellation\n"
        f"BuildLog(Path({str(tmp_path / 'log')!r}), Cancellation()).run("
        f"'a test', [sys.executable, '-c', {_STAYS!r}], on_line=lambda line: print(line, end='', flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        pid = int(killed.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        killed.send_signal(number)
        try:
            killed.wait(hygiene.patience(20))
        finally:
            killed.kill()
    try:
        assert _gone(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


MXNET = Target(Path(sys.executable), {"mxnet": "1.9.1"})


class _Pip(BuildLog):
    """Stands for pip: fetches an sdist of one file, and makes a wheel of it, or fails; `meet` is called before."""

    def __init__(
        self, folder: Path, fails: bool, scratch: Path | None = None, meet: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__(folder / "log", Cancellation())
        self.did: list[str] = []
        self.fails = fails
        self.scratch = scratch or store.folder("mxnet") / "horovod"
        self.meet = meet

    def run(self, stage: str, command: Any, **options: Any) -> None:
        self.did.append(stage)
        scratch = self.scratch
        if stage == "fetching Horovod":
            with tarfile.open(scratch / wheel._SDIST, "w:gz") as archive:
                archive.add(__file__, f"horovod-{pins.HOROVOD_VERSION}/setup.py")
            return
        if stage == "installing the build's tools":
            assert scratch / "tools" in command
            return
        assert (scratch / f"horovod-{pins.HOROVOD_VERSION}" / "setup.py").is_file() and options["cwd"] == scratch
        if self.fails:
            raise RunError("compiling Horovod failed")
        self.meet()
        options["on_line"]("[ 42%] Building CXX object")
        (scratch / "horovod-0.28.1-cp311.whl").write_text("compiled")


def test_a_wheel_is_compiled_once_and_nothing_else_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDKIT_RUNTIMES", str(tmp_path / "runtimes"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(patches, "every", tuple)
    store.folder("mxnet").mkdir(parents=True)
    done: list[int] = []

    def obtain(fails: bool) -> tuple[Path, list[str]]:
        pip = _Pip(tmp_path, fails)
        found = wheel.obtain(MXNET, store.folder("mxnet") / "horovod", pip, done.append)
        return found, pip.did

    with pytest.raises(RunError, match=r"^compiling Horovod failed$"):
        obtain(fails=True)
    assert wheel.cached(MXNET) is None
    made, did = obtain(fails=False)
    assert made.read_text() == "compiled" and done == [42]
    assert did == ["fetching Horovod", "installing the build's tools", "compiling Horovod"], (
        "it is not the sdist of the pinned hash, so fetched again"
    )
    assert sorted(path.name for path in made.parent.iterdir()) == [made.name, "made-from.json"]
    assert obtain(fails=False) == (made, [])
    assert list(store.folder("mxnet").iterdir()) == []


def test_two_builds_of_one_wheel_at_once_do_not_spoil_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(patches, "every", tuple)
    both = threading.Barrier(2)

    def obtain(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        pip = _Pip(folder, fails=False, scratch=folder / "build", meet=lambda: both.wait(hygiene.patience(60)))
        return wheel.obtain(MXNET, folder / "build", pip, lambda percent: None)

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(obtain, ("first", "second"))
    assert first == second == wheel.cached(MXNET) and first.read_text() == "compiled"
    assert sorted(path.name for path in first.parent.iterdir()) == [first.name, "made-from.json"]


def test_what_a_killed_build_left_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDKIT_RUNTIMES", str(tmp_path))
    (store.folder("mxnet") / "horovod").mkdir(parents=True)
    environment.remove("mxnet")
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_reported_before_anything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    pip = _Pip(tmp_path, fails=False)
    with pytest.raises(RunError, match=r"cannot be written .* set XDG_CACHE_HOME"):
        wheel.obtain(MXNET, store.folder("mxnet") / "horovod", pip, print)
    assert pip.did == []


class _Ring:
    """What the proof asks of an adapter, for rank 0 of 2: right answers, or one of them spoilt."""

    def __init__(self, spoilt: str = "") -> None:
        self.spoilt = spoilt
        self.asked: list[str] = []

    def from_numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def to_numpy(self, array: np.ndarray) -> np.ndarray:
        return array

    def allreduce(self, tensors: list[np.ndarray], group: Group, op: str, name: str) -> list[np.ndarray]:
        assert op == "sum"
        self.asked.append("allreduce")
        full, counted = np.full((3, 2), 3, np.float32), np.arange(5, dtype=np.float32)
        return [full, counted[::-1] if self.spoilt == "allreduce" else counted]

    def allgather(self, tensor: np.ndarray, group: Group, name: str) -> np.ndarray:
        self.asked.append("allgather")
        rows = np.array([[0, 0], [1, 1], [1, 1]], np.float32)
        return rows[:2] if self.spoilt == "allgather" else rows

    def broadcast(self, tensor: np.ndarray, group: Group, root_rank: int, name: str) -> np.ndarray:
        assert root_rank == 1
        self.asked.append("broadcast")
        return tensor if self.spoilt == "broadcast" else np.full(4, 8, np.float32)


def test_the_proof_accepts_right_results() -> None:
    ring = _Ring()
    proof.check(ring, rank=0, size=2)
    assert ring.asked == ["allreduce", "allgather", "broadcast"], "what was not tried is not proved"


@pytest.mark.parametrize("collective", ["allreduce", "allgather", "broadcast"])
def test_the_proof_refuses_a_wrong_result_and_names_it(collective: str) -> None:
    with pytest.raises(RunError, match=rf"^{collective} on rank 0 gave .* expected .* must not be used$"):
        proof.check(_Ring(spoilt=collective), rank=0, size=2)


@pytest.mark.parametrize("framework", [*rest_thorough("pytorch", "tensorflow", "keras"), "mxnet"])
def test_each_framework_passes_the_proof_in_its_runtime(framework: str) -> None:
    """It raises where a result is wrong, as the test above shows."""
    prove(store.find(framework), framework)


@pytest.mark.parametrize("name", pins.RUNTIMES)
def test_a_runtime_has_the_pinned_versions_and_only_hvdkits_own_package(name: str) -> None:
    runtime = store.load(name)
    assert runtime is not None, f"run `hvdkit runtime build {name}`"
    pin = pins.RUNTIMES[name]
    pinned = dict(package.split("==") for package in pin.packages(gpu=False))
    assert runtime.versions[pin.module].partition("+")[0] == next(iter(pinned.values()))
    assert runtime.versions["numpy"] == pinned["numpy"]
    assert runtime.versions["horovod"] == pins.HOROVOD_VERSION
    assert "gloo" in runtime.operations
    where = "import hvdkit, sys; print(hvdkit.__file__); sys.exit('typer' in sys.modules)"
    done = subprocess.run([runtime.python, "-c", where], cwd="/", capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).parent.resolve() == store.PACKAGE


@pytest.mark.parametrize("name", pins.RUNTIMES)
def test_the_wheel_key_knows_the_installed_framework_and_numpy(name: str) -> None:
    versions = target.versions(store.python_of(name))
    assert versions["numpy"] == store.find(name).versions["numpy"]
    assert set(versions) == {"numpy", pins.RUNTIMES[name].module}


@pytest.mark.parametrize(
    "versions", [{"torch": "2.13.0"}, {"tensorflow": "2.21.0"}, {"tensorflow": "2.15.1"}, {"mxnet": "1.9.1"}]
)
def test_the_patches_fit_the_released_horovod(tmp_path: Path, versions: dict[str, str]) -> None:
    log = BuildLog(tmp_path / "log", Cancellation())
    source = wheel.unpack(wheel.sdist(Path(sys.executable), tmp_path, log), tmp_path)
    chosen = patches.chosen(versions)
    patches.apply(source, chosen)
    assert len(chosen) > 10
    assert "set(CMAKE_CXX_STANDARD 17)" in (source / "CMakeLists.txt").read_text()
