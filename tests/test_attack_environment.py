"""Odd environments: settings that others have made for themselves, and variables that ranks inherit."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdkit import usage
from hvdkit.adapters.capabilities import ENVIRONMENT
from hvdkit.commands import bench
from hvdkit.commands.bench import measured as fit
from hvdkit.launch.placement import environment_faults
from hvdkit.report import gantt, parity, plotting
from hvdkit.report import profile as profile_
from hvdkit.results.parity import read_parity
from hvdkit.worker import tuning
from tests.attacks import HVDKIT, attack, refused, sound
from tests.conftest import FRAMEWORKS, Hvdkit, committed_parity
from tests.test_bench import measured

pytestmark = pytest.mark.check

PREDICT = "predict profile.json --cluster p100-roce25 -n 8 --out out"


@pytest.mark.parametrize(
    ("backend", "command"), [("module://matplotlib_inline.backend_inline", PREDICT), ("nonsense", "report comparison")]
)
def test_the_backend_is_hvdkits_own(backend: str, command: str, here: Path, real: Path) -> None:
    done = attack(here, f"{HVDKIT} {command}", MPLBACKEND=backend)
    assert done.returncode == 0, done.stderr
    sound(done)


@pytest.mark.parametrize(
    "spoil",
    [
        # A FIFO in each place, which nobody writes: whoever looks there waits for ever.
        "mkdir conf; mkfifo matplotlibrc rc conf/matplotlibrc; export MATPLOTLIBRC=$PWD/rc MPLCONFIGDIR=$PWD/conf",
        "printf 'backend: nonsense\\nsavefig.format: nix\\n' > matplotlibrc; export MPLCONFIGDIR=/dev/null",
    ],
)
def test_a_matplotlibrc_of_others_is_not_looked_at(spoil: str, here: Path) -> None:
    done = attack(here, f"{spoil}; {HVDKIT} {PREDICT}", timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert (here / "out" / "predict.png").read_bytes()[:4] == b"\x89PNG"


def test_every_picture_is_drawn_by_way_of_the_one_place() -> None:
    """So that the two tests above hold for compare, parity, profile and bench too."""
    for module in (gantt, parity, bench, profile_):
        text = Path(str(module.__file__)).read_text()
        assert "plotting.picture(" in text and "import matplotlib" not in text and "pyplot" not in text
    for path in Path(str(plotting.__file__)).parent.glob("*.py"):
        assert "pyplot" not in path.read_text(), path


def test_a_picture_leaves_the_callers_folder_backend_and_settings(here: Path) -> None:
    code = "import os; from pathlib import Path; from hvdkit.report import plotting\n"
    code += "with plotting.picture(Path('a.png'), 1, 1) as figure: figure.subplots().plot([1, 2])\n"
    code += "import matplotlib; print(Path.cwd().name, os.environ['MPLBACKEND'], matplotlib.rcParams['font.size'])"
    done = attack(here, [sys.executable, "-c", code], MPLBACKEND="nonsense")
    assert done.stdout.split() == [here.name, "nonsense", "10.0"], done.stderr


def test_the_ticks_of_logarithmic_axes_are_no_formulas(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure
    from matplotlib.text import Text

    drawn: list[str] = []

    def read(figure: Figure, *_: Any, **__: Any) -> None:
        figure.draw_without_rendering()
        drawn.extend(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text))

    monkeypatch.setattr(Figure, "savefig", read)
    found = read_parity(committed_parity(here))
    parity.parity_plot(found, here / "parity.png")
    times = measured("allreduce", 4, 900.0, 0.12)
    bench.bench_plot(times, fit(times), here / "bench.png")
    assert {"1e\N{MINUS SIGN}12", "1000"} < set(drawn)
    assert not [text for text in drawn if "$" in text or "\\" in text]


@pytest.mark.parametrize(
    "environment",
    [
        {"HOME": "", "TMPDIR": "/nowhere", "COLUMNS": "0", "PYTHONOPTIMIZE": "2", "TZ": "nonsense/x"},
        {"HOME": "/nowhere", "COLUMNS": "x", "PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1", "LC_ALL": "xx_YY.utf99"},
        {"TERM": "nonsense", "FORCE_COLOR": "1", "XDG_CACHE_HOME": "/dev/null", "HVDKIT_RUNTIMES": "/dev/null"},
    ],
    ids=lambda each: "-".join(each),
)  # fmt: skip
def test_odd_environments_change_nothing(environment: dict[str, str], here: Path) -> None:
    done = attack(here, f"{HVDKIT} {PREDICT}", **environment)
    assert done.returncode == 0, done.stderr
    sound(done)
    assert (here / "out" / "predict.png").stat().st_size > 10_000


def test_a_folder_that_is_gone_and_runtimes_that_are_none(inside: Hvdkit, tmp_path: Path) -> None:
    sound(attack(tmp_path, f"mkdir gone; cd gone; rmdir ../gone; {HVDKIT} recipes list"))
    done = attack(tmp_path, f"mkdir gone; cd gone; rmdir ../gone; {HVDKIT} report x")
    refused(done, "no such folder")
    (tmp_path / "pytorch").mkdir()
    os.mkfifo(tmp_path / "pytorch" / "runtime.json")
    done = inside("train", "resnet20-digits", HVDKIT_RUNTIMES=str(tmp_path))
    refused(done, "runtime.json cannot be read")
    os.mkfifo(tmp_path / ".pytorch.lock")
    done = inside("runtime", "build", "pytorch", "--cpu", HVDKIT_RUNTIMES=str(tmp_path))
    assert done.returncode == 1 and "it is a FIFO, not a file" in done.stderr


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_would_end_every_rank_is_said_before_any_is_started(framework: str) -> None:
    for name, (expected, _) in ENVIRONMENT.get(framework, {}).items():
        for value in ("garbage", "0", "-1", "1.5"):
            faults = environment_faults(framework, {name: value})
            assert len(faults) == 1 and name in faults[0] and expected in faults[0] and value in faults[0]
        right = "NaiveEngine" if "ENGINE" in name else "3"
        assert environment_faults(framework, {name: right}) == []
    for value in ("abc", "-1", "nan", "inf"):
        (fault,) = environment_faults(framework, {"HOROVOD_CYCLE_TIME": value})
        assert "HOROVOD_CYCLE_TIME: expected a number" in fault
    assert environment_faults(framework, {"HOROVOD_CYCLE_TIME": "5", "HOROVOD_FUSION_THRESHOLD": ""}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("MXNET_ENGINE_TYPE", "garbage"), ("MXNET_CPU_WORKER_NTHREADS", "0"), ("HOROVOD_CYCLE_TIME", "x")],
)
@pytest.mark.parametrize("command", ["train resnet20-digits", "bench allreduce", "profile resnet20-digits"])
def test_each_command_that_starts_ranks_refuses_such_a_variable(
    name: str, value: str, command: str, inside: Hvdkit, tmp_path: Path
) -> None:
    done = inside(*command.split(), "--framework", "mxnet", "--out", "run", **{name: value})
    refused(done, f"{name}: expected", repr(value))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", ["abc", "nan", "inf", "-5", "1e400", ""])
def test_a_start_that_no_launcher_has_told_counts_for_nothing(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDKIT_STARTED", value)
    # The least of many: a process that is interrupted between two clocks gets a later one.
    assert abs(min(usage.started_at() for _ in range(20)) - min(usage.process_began() for _ in range(20))) < 1
    monkeypatch.setenv("HVDKIT_STARTED", "12.5")
    assert usage.started_at() == 12.5


@pytest.mark.parametrize("value", ["", "{", "3", '{"a": 1}', '{"a": {"b": 1}}', "[" * 100_000])
def test_choices_that_no_launcher_has_made_count_for_nothing(value: str) -> None:
    assert tuning._brought_along({tuning.CHOSEN: value}) == {}
