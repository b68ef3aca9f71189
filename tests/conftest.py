"""What the tests share: the checkout, the runtimes, and processes that cannot outlive their timeout."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hygiene
import hypothesis
import pytest
import warm as warming

from hvdkit.runtimes import pins, store

hygiene.clean_up_parent()  # before a test module is imported

# Neither the load of the machine nor chance decides whether a property holds.
hypothesis.settings.register_profile("hvdkit", deadline=None, derandomize=True)
hypothesis.settings.load_profile("hvdkit")

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS = ("pytorch", "tensorflow", "keras", "mxnet")

# Files whose tests are marked `check`, but for those marked `ranks`: they start no ranks, need no runtime and no
# browser and read no clock. `make check` runs them, `make test` too, on the time that the others leave.
CHECK = {
    "attack", "attack_environment", "attack_files", "attack_streams", "attack_values", "batch_sizes",
    "batch_sizes_rows", "bench", "blame", "compare", "completion", "compression", "config", "core", "csv", "data",
    "data_native", "data_pixels", "debug_logs", "diff", "dockerfile", "documents", "dry_run", "fingerprint", "hints",
    "horovod_cuda",
    "horovod_target", "host_doctor", "images", "kubernetes", "launch_hosts", "links", "memory", "mesh", "own_samples",
    "paths", "predict", "profile", "progress", "progress_runs", "published", "quick", "refused", "report_files",
    "runtimes_patches", "schemas", "script", "sharding", "simulator", "simulator_contradictions", "simulator_costs",
    "simulator_damaged", "simulator_properties", "simulator_refusals", "simulator_sharding", "stalls", "submit",
    "sweep", "sync", "text_units", "tuning", "validation", "weights", "yaml",
}  # fmt: skip

# The files that take longest, the longest first: no stream of scripts/run_tests.py shall work on one of them while the
# others are done.
LONGEST = (
    "contract", "faults", "elastic", "ends", "train", "horovod_front_ends", "checkpoint_runs", "rivals", "parity",
    "own_images", "horovod_scripts", "profile_runs", "package_install", "export", "own_task", "python", "tracking",
    "run_tests", "data_runs", "plain", "launch_horovod", "gpt", "debugging", "link", "runtimes_build", "own_hosts",
    "process_sets", "examples", "horovod_wheel", "events", "report",
)  # fmt: skip

Hvdkit = Callable[..., subprocess.CompletedProcess[str]]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not read files none of whose tests are of the part that scripts/run_tests.py asks for."""
    if collection_path.suffix == ".py" and (part := config.option.markexpr) in ("check", "not check"):
        whole = collection_path.stem.removeprefix("test_") in CHECK
        exception = "mark.ranks" if whole else "mark.check"
        if whole != (part == "check") and exception not in collection_path.read_text():
            return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the files in CHECK, make timeouts patient; where processes share the files, bring LONGEST to the front."""
    for item in items:
        limit = item.get_closest_marker("timeout")
        seconds = limit.args[0] if limit else item.config.getoption("timeout") or item.config.getini("timeout")
        item.add_marker(pytest.mark.timeout(hygiene.patience(float(seconds))), append=False)
        whole = _topic(item) in CHECK
        if whole and not item.get_closest_marker("ranks"):
            item.add_marker(pytest.mark.check)
    if hasattr(config, "workerinput"):  # of pytest-xdist
        place = {topic: number for number, topic in enumerate(LONGEST)}
        items.sort(key=lambda item: place.get(_topic(item), len(place)))


def _topic(item: pytest.Item) -> str:
    return item.path.stem.removeprefix("test_")


def run(command: list[str], timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; past `timeout` seconds, or rather later, all that it has started is ended.

    `timeout` is what a quiet machine needs at most (hygiene.patience); the test fails then.
    """
    timeout = hygiene.patience(timeout)
    with hygiene.marking() as mark:
        environment = {**(options.pop("env", None) or os.environ), hygiene.MARK: mark}
        process = subprocess.Popen(
            command,
            stdin=options.pop("stdin", subprocess.DEVNULL),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=environment,
            **options,
        )
    try:
        out, err = process.communicate(timeout=timeout)
    except BaseException as error:  # pytest's own timeout is one, too
        late, told = isinstance(error, subprocess.TimeoutExpired), ("", "")
        if late:
            os.killpg(process.pid, signal.SIGTERM)  # hvdkit ends its ranks
            with contextlib.suppress(subprocess.TimeoutExpired):
                told = process.communicate(timeout=15)
        hygiene.kill_started_by(mark)
        with contextlib.suppress(subprocess.TimeoutExpired):
            told = process.communicate(timeout=15)
        if late:
            pytest.fail(f"{command} did not end within {timeout} s\n{''.join(told)}")
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.fixture(scope="module", autouse=True)
def nothing_outlives_its_file(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a file's tests have started is gone behind them: what is left is ended, and is a failure of that file.

    By a mark, so that neither other files' processes nor another suite's are taken for theirs.
    """
    failed = request.session.testsfailed
    with hygiene.marking() as mark:
        yield
    left = hygiene.left_behind(mark)
    if left and request.session.testsfailed == failed:  # a test that failed has said so already
        pytest.fail("still running behind the last test of this file:\n" + "\n".join(left))


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


@pytest.fixture
def inside(tmp_path: Path) -> Hvdkit:
    """As `hvdkit`, in this process (inside.py): for what is refused before anything starts."""
    from inside import call

    return partial(call, tmp_path)


@pytest.fixture(scope="session")
def recipe() -> Path:
    """The recipe that the README is about."""
    return ROOT / "recipes" / "resnet20-digits.yaml"


@pytest.fixture(scope="session")
def checkpoint_40(tmp_path_factory: pytest.TempPathFactory, recipe: Path, warm_runtimes: Path) -> Path:
    """A checkpoint behind step 40 of a real run of one rank under MXNet; to be read only."""
    folder = tmp_path_factory.mktemp("checkpoint")
    command = [sys.executable, "-m", "hvdkit", "train", str(recipe), "--framework", "mxnet", "--out", "run", "steps=40"]
    environment = os.environ | {"HVDKIT_RUNTIMES": str(warm_runtimes)}
    done = run([*command, "checkpoint={}"], 120, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return folder / "run" / "checkpoints" / "step-00000040"


@pytest.fixture
def real(tmp_path: Path) -> Path:
    """A copy of a real comparison's files."""
    return Path(shutil.copytree(ROOT / "tests" / "data" / "comparison", tmp_path / "comparison"))


@pytest.fixture(scope="session")
def hollow_runtimes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runtimes that requests can be checked against, and in which nothing can be started."""
    folder = tmp_path_factory.mktemp("hollow")
    for name in pins.RUNTIMES:
        python = folder / name / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text("#!/bin/sh\necho 'a test marked check starts a rank' >&2\nexit 1\n")
        python.chmod(0o755)
        made = store.Runtime(
            name=name, python=python, key="", gpu=False, added=False, versions={}, controllers=["gloo"],
            operations=["gloo"],
        )  # fmt: skip
        (folder / name / "runtime.json").write_text(made.model_dump_json())
    return folder


@pytest.fixture(autouse=True)
def no_ranks_in_a_check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is marked `check` passes on a machine without runtimes, so it does without them everywhere."""
    if request.node.get_closest_marker("check"):
        monkeypatch.setenv("HVDKIT_RUNTIMES", str(request.getfixturevalue("hollow_runtimes")))


@pytest.fixture(scope="session")
def warm_runtimes() -> Iterator[Path]:
    """Runtimes whose frameworks are imported once for all files (tests/warm)."""
    with warming.runtimes() as folder:
        yield folder


@pytest.fixture
def warm(warm_runtimes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of this test start where their framework is imported already."""
    monkeypatch.setenv("HVDKIT_RUNTIMES", str(warm_runtimes))
