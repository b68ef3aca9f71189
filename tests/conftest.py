"""What the tests share: the checkout, the runtimes, and processes that cannot outlive their timeout."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS = ("pytorch", "tensorflow", "keras", "mxnet")

# Files whose tests start no ranks and look at no clock: scripts/run_tests.py runs them beside the others.
BESIDE = {
    "attack", "attack_environment", "attack_files", "attack_streams", "attack_values", "compare", "compression",
    "config", "core", "data", "data_native", "data_pixels", "dockerfile", "documents", "launch_hosts", "paths",
    "predict", "profile", "report", "report_files", "runtimes_edits", "simulator", "simulator_costs", "sync",
    "validation",
}  # fmt: skip

Hvdkit = Callable[..., subprocess.CompletedProcess[str]]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in a shell's background job, and what tests start inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark those of the files in BESIDE."""
    for item in items:
        if item.path.stem.removeprefix("test_") in BESIDE:
            item.add_marker(pytest.mark.beside)


def run(command: list[str], timeout: float, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; past `timeout` seconds the whole process group is killed and the test fails."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # hvdkit ends its ranks
        try:
            process.communicate(timeout=15)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"{command} did not end within {timeout} s")
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(autouse=True)
def no_cycle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a test plays in its own process set it; elastic runs of later tests would refuse it."""
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)


@pytest.fixture
def hvdkit(tmp_path: Path) -> Hvdkit:
    """Call the command line in an empty folder: `hvdkit("train", recipe, ...)`."""

    def call(*arguments: object, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hvdkit", *map(str, arguments)]
        return run(command, timeout, cwd=tmp_path, env=os.environ | environment)

    return call


@pytest.fixture(scope="session")
def recipe() -> Path:
    """The recipe that the README is about."""
    return ROOT / "recipes" / "resnet20-digits.yaml"


@pytest.fixture(scope="session")
def checkpoint_40(tmp_path_factory: pytest.TempPathFactory, recipe: Path) -> Path:
    """A checkpoint behind step 40 of a real run of one rank under MXNet; to be read only."""
    folder = tmp_path_factory.mktemp("checkpoint")
    command = [sys.executable, "-m", "hvdkit", "train", str(recipe), "--framework", "mxnet", "--out", "run", "steps=40"]
    done = run([*command, "checkpoint={}"], 120, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run" / "checkpoints" / "step-00000040"


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A copy of a real comparison's files."""
    return Path(shutil.copytree(ROOT / "tests" / "data" / "comparison", tmp_path / "comparison"))
