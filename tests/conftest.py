"""What the tests share: the checkout, the runtimes, and processes that cannot outlive their timeout."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis.internal.conjecture import providers

from hvdkit.runtimes import pins, store
from tests import hygiene
from tests import warm as warming

hygiene.clean_up_parent()  # before a test module is imported
# Reading the tests takes twice the time where no bytecode is kept, as in many containers (Makefile's COMPILE).
sys.dont_write_bytecode = False

# Neither the load of the machine nor chance decides whether a property holds. By default Hypothesis also draws numbers
# that it reads in the code of all modules that are loaded by then: the examples would be others after each change of
# the code, and would depend on the tests before.
hypothesis.settings.register_profile(
    "hvdkit",
    deadline=None,
    derandomize=not os.environ.get("HVDKIT_TEST_RANDOM"),
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("hvdkit")
providers.is_local_module_file = lambda path: False

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS = ("pytorch", "tensorflow", "keras", "mxnet")


def rest_thorough(first: Any, *others: Any) -> list[Any]:
    """Parameters of which `make test` tries the first, and `make test-all` the others too."""
    return [first, *(pytest.param(value, marks=pytest.mark.thorough) for value in others)]


KERAS_THOROUGH = ("pytorch", "tensorflow", pytest.param("keras", marks=pytest.mark.thorough), "mxnet")

Hvdkit = Callable[..., subprocess.CompletedProcess[str]]


def pytest_configure(config: pytest.Config) -> None:
    """However the suite ends, also by Ctrl-C or SIGTERM, no process that a test has started is left."""
    if hasattr(config, "workerinput"):  # of pytest-xdist, which ends its workers before this process cleans up
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    end = contextlib.ExitStack()
    end.callback(hygiene.kill_started_by, end.enter_context(hygiene.marking()))
    config.add_cleanup(end.close)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Three processes on two cores, fewer where memory is short: most tests start two ranks, and wait now and then."""
    cores = len(os.sched_getaffinity(0))
    if "check" in config.option.markexpr:
        return cores
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return max(2, min(3 * cores // 2, memory_gib // 5))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make check` does not read files that have no test for it."""
    if collection_path.suffix == ".py" and config.option.markexpr.startswith("check"):
        return "mark.check" not in collection_path.read_text() or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Make timeouts patient; where processes share the files, the long ones come first."""
    for item in items:
        limit = item.get_closest_marker("timeout")
        seconds = limit.args[0] if limit else item.config.getoption("timeout") or item.config.getini("timeout")
        item.add_marker(pytest.mark.timeout(hygiene.patience(float(seconds))), append=False)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: item.get_closest_marker("long") is None)


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
    """Whatever a file's tests have started is gone after them: what is left is ended, and is a failure of that file.

    By a mark, so that neither other files' processes nor another suite's are taken for theirs.
    """
    failed = request.session.testsfailed
    with hygiene.marking() as mark:
        yield
    if request.session.exitstatus == pytest.ExitCode.INTERRUPTED:  # Ctrl-C waits for nobody
        hygiene.kill_started_by(mark)
        return
    left = hygiene.left_behind(mark)
    if left and request.session.testsfailed == failed:  # a test that failed has said so already
        pytest.fail("still running after the last test of this file:\n" + "\n".join(left))


@pytest.fixture(autouse=True)
def no_cycle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that a test plays in its own process set it; elastic runs of later tests would refuse it."""
    monkeypatch.delenv("HOROVOD_CYCLE_TIME", raising=False)


@pytest.fixture
def hvdkit(tmp_path: Path) -> Hvdkit:
    """Call the command line in an empty folder: `hvdkit("train", recipe, ...)`."""

    def call(*arguments: object, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [*warming.command_line(), *map(str, arguments)]
        return run(command, timeout, cwd=tmp_path, env=os.environ | environment)

    return call


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark for this test's processes; none of them may be left at its end."""
    from tests.launching import nothing_left

    name = uuid.uuid4().hex
    with nothing_left(name):
        yield name


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Two ranks of each runtime (residents.py)."""
    from tests.residents import residents

    with residents(tmp_path_factory.mktemp("residents")) as start:
        yield start


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with a profile in it."""
    from hvdkit.results import profile
    from tests import simulating

    profile.save(simulating.profile(), tmp_path / "profile.json")
    return tmp_path


@pytest.fixture
def inside(tmp_path: Path) -> Hvdkit:
    """As `hvdkit`, in this process (inside.py): for what is refused before anything starts."""
    from tests.inside import call

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
    command += ["model.name=resnet8", "threads=1"]  # a third of the work of the recipe's own
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
    if request.node.get_closest_marker("check") and not request.node.get_closest_marker("ranks"):
        monkeypatch.setenv("HVDKIT_RUNTIMES", str(request.getfixturevalue("hollow_runtimes")))


@pytest.fixture(scope="session")
def warm_runtimes() -> Iterator[Path]:
    """Runtimes whose frameworks are imported once for all files (tests/warm)."""
    with warming.runtimes() as folder:
        yield folder


@pytest.fixture
def warm(warm_runtimes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of this test start where their framework is imported already; one alone has one thread too."""
    monkeypatch.setenv("HVDKIT_RUNTIMES", str(warm_runtimes))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def committed_parity(folder: Path) -> Path:
    """The parity.json of ResNet-20 that is kept with the benchmarks, in a folder."""
    kept = ROOT / "benchmarks" / "parity" / "resnet20-digits" / "parity.json.gz"
    (folder / "parity.json").write_bytes(gzip.decompress(kept.read_bytes()))
    return folder / "parity.json"
