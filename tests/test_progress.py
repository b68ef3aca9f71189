"""What a waiting user sees of builds and comparisons, and how the time left is estimated, by a clock of the test's."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from hvdkit import bars
from hvdkit.report.progress import SILENCE_S, ComparisonProgress, RunProgress, StageProgress
from hvdkit.results.train import MetricLine
from hvdkit.runtimes import pins
from hvdkit.runtimes import progress as building
from hvdkit.runtimes.progress import COMPILE, CREATE, INSTALL, PROVE, BuildProgress
from hvdkit.time_left import TimeLeft, about


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})  # the usual time is that of two cores
    return Clock()


def test_without_usual_times_nothing_is_promised_before_something_is_done(clock: Clock) -> None:
    left = TimeLeft({"a": 1, "b": 3}, clock=clock)
    clock.now += 10
    assert (left.seconds(), left.text()) == (None, "")
    left.done("a")
    assert left.seconds() == pytest.approx(30)
    left.done("b", 0.5)
    clock.now += 15
    assert left.seconds() == pytest.approx(15)
    left.done("b", 0.4)  # a late report of less takes nothing back
    assert left.seconds() == pytest.approx(15)
    left.done("b")
    assert (left.seconds(), left.text()) == (0, "")


def test_the_usual_time_counts_at_first_and_the_measured_one_later(clock: Clock) -> None:
    left = TimeLeft(dict.fromkeys(range(100), 1.0), usual_s=600, trust_s=60, clock=clock)
    assert left.seconds() == pytest.approx(600)
    clock.now += 12  # twice as slow as usual, but that is one part
    left.done(0)
    assert 594 < left.seconds() < 720
    clock.now += 49 * 12
    for number in range(50):
        left.done(number)
    assert 540 < left.seconds() < 600, "50 parts that took 12 s each say more than the usual 6 s"


def test_a_part_at_work_counts_as_half_done(clock: Clock) -> None:
    left = TimeLeft({"a": 50, "b": 50}, usual_s=100, clock=clock)
    left.begin("a")
    clock.now += 25
    assert left.seconds() == pytest.approx(75)
    left.done("a", 0.8)
    assert left.seconds() < 75


def test_what_is_dropped_needs_no_time(clock: Clock) -> None:
    left = TimeLeft({"a": 50, "b": 50}, usual_s=100, clock=clock)
    left.done("a", 0.5)
    left.drop("a")
    clock.now += 25
    assert left.seconds() == pytest.approx(50)
    left.drop("b")
    assert left.seconds() == 0


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(None, ""), (0.0, ""), (3, "about 10 s left"), (41, "about 50 s left"), (89, "about 90 s left"),
     (95, "about 2 min left"), (400, "about 7 min left")],
)  # fmt: skip
def test_an_estimate_promises_no_seconds_that_it_does_not_know(seconds: float | None, words: str) -> None:
    assert about(seconds) == words


def test_every_runtime_has_costs_for_every_stage() -> None:
    assert building.COSTS.keys() == {*pins.RUNTIMES, "horovod"}
    for name, costs in building.COSTS.items():
        assert list(costs) == ([CREATE, INSTALL] if name in pins.RUNTIMES else []) + [COMPILE, PROVE], name
        assert min(costs.values()) > 0, name


def _build(clock: Clock, names: list[str], terminal: bool = False) -> tuple[BuildProgress, io.StringIO]:
    shown = io.StringIO()
    return BuildProgress(Console(file=shown, force_terminal=terminal, width=120), names, clock), shown


def _left_s(line: str) -> float:
    found = re.search(r"\(about (\d+) (min|s) left\)$", line)
    assert found, line
    return float(found[1]) * (60 if found[2] == "min" else 1)


def test_a_build_shows_a_line_a_stage_with_the_time_left(clock: Clock) -> None:
    progress, shown = _build(clock, ["mxnet", "pytorch"])
    with progress:
        for stage in (CREATE, INSTALL, COMPILE, PROVE):
            for name in ("mxnet", "pytorch"):
                progress.stage(name, stage, f"at {stage}")
                clock.now += building.COSTS[name][stage]
        progress.end("mxnet", "ready: one", good=True)
        progress.end("pytorch", "ready: two", good=True)
    lines = shown.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[0].startswith("[ 0:00] mxnet: at create (about ")
    assert lines[1].startswith("[ 0:04] pytorch: at create (about ")
    lefts = [_left_s(line) for line in lines[:8]]
    assert all(later <= sooner + 10 for sooner, later in pairwise(lefts)), lefts
    assert lefts[0] == 120 and lefts[-1] <= 20, "121 s on two cores at first; the last stage of one is 12 s"
    assert lines[-1].endswith(": ready: two"), "nothing is left"


def test_a_long_stage_of_a_build_is_not_silent(clock: Clock) -> None:
    progress, shown = _build(clock, ["mxnet", "pytorch"])
    progress.stage("mxnet", INSTALL, "installing the framework")
    progress.stage("pytorch", COMPILE, "compiling Horovod")
    clock.now += 59
    progress.beat()
    assert len(shown.getvalue().splitlines()) == 2, "not before a minute without a line"
    clock.now += 1
    progress.advance("pytorch", 0.43)
    progress.beat()
    progress.beat()
    (line,) = shown.getvalue().splitlines()[2:]
    assert line.startswith(
        "[ 1:00] mxnet: installing the framework, still at it; pytorch: compiling Horovod, 43% (about"
    )
    progress.end("mxnet", "failed", good=False)
    progress.end("pytorch", "ready", good=True)
    clock.now += 60
    progress.beat()
    assert shown.getvalue().splitlines()[-1] == "[ 1:00] pytorch: ready", "nothing is at work"


def test_a_long_epoch_and_a_long_start_are_not_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    progress = RunProgress(["one"], clock=clock)
    clock.now += 100
    progress.beat()
    assert capsys.readouterr().err == "", "nothing has begun"
    see = progress.watch("one")
    progress.beat()
    see(_line(1, 9, ends_epoch=False))
    clock.now += 60
    see(_line(2, 9, ends_epoch=False))
    progress.beat()
    told = capsys.readouterr().err.splitlines()
    step = "one: step 2/9, 99 images/s, loss 1.000, rate 0.1 (about 7 min left)"
    assert told == ["[ 1:40] one: starting", f"[ 2:40] {step}"]
    for stages, expected in (
        (StageProgress("parity", 3, clock=clock), "parity 1/3: pytorch, still at it"),
        (ComparisonProgress([(1, "a", 1), (2, "a", 1)], True, clock=clock), "run 1/2: a, round 1/2: starting"),
    ):
        stages.beat()
        stages.begin("pytorch") if isinstance(stages, StageProgress) else stages.watch("a")
        clock.now += 60
        stages.beat()
        assert [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()[1:]] == [expected]


def test_a_thread_prints_the_lines_of_a_silent_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bars, "SILENCE_S", 0.01)
    monkeypatch.setattr(bars, "_BEAT_S", 0.01)
    shown = io.StringIO()
    progress = BuildProgress(Console(file=shown, force_terminal=False), ["mxnet"])
    with progress:
        progress.stage("mxnet", COMPILE, "compiling")
        until = time.monotonic() + 20
        while shown.getvalue().count("still at it") < 2 and time.monotonic() < until:
            time.sleep(0.01)
    assert shown.getvalue().count("mxnet: compiling, still at it") >= 2
    lines = len(shown.getvalue().splitlines())
    time.sleep(0.1)
    assert len(shown.getvalue().splitlines()) == lines, "it has ended"


def test_a_wheel_from_the_cache_and_a_failed_runtime_take_no_more_time(clock: Clock) -> None:
    progress, shown = _build(clock, ["mxnet", "pytorch"])
    progress.stage("mxnet", COMPILE, "compiling")
    before = _left_s(shown.getvalue().splitlines()[-1])
    progress.skip("mxnet")
    progress.waits("pytorch", "waiting")
    assert _left_s(shown.getvalue().splitlines()[-1]) < before
    progress.end("pytorch", "failed", good=False)
    progress.stage("mxnet", PROVE, "proving")
    assert _left_s(shown.getvalue().splitlines()[-1]) <= 20
    progress.end("mxnet", "ready", good=True)
    assert shown.getvalue().splitlines()[-1] == "[ 0:00] mxnet: ready"


def test_a_build_that_only_waits_for_another_ends_without_having_begun(clock: Clock) -> None:
    progress, shown = _build(clock, ["mxnet"])
    progress.waits("mxnet", "waiting")
    progress.end("mxnet", "made by another build", good=True)
    assert shown.getvalue().splitlines()[-1] == "[ 0:00] mxnet: made by another build"


def test_a_terminal_shows_a_bar_a_runtime_and_one_for_all_with_the_time_left(clock: Clock) -> None:
    progress, shown = _build(clock, ["mxnet", "pytorch"], terminal=True)
    with progress:
        progress.stage("mxnet", CREATE, "making the environment")
        progress.stage("mxnet", COMPILE, "compiling Horovod")
        progress.advance("mxnet", 0.5)
        progress.end("pytorch", "failed", good=False)
        progress.end("mxnet", "ready", good=True)
    for text in ("mxnet", "pytorch", "all", "left", "ready", "failed"):
        assert text in shown.getvalue(), text


def _line(step: int, total: int, ends_epoch: bool = True) -> MetricLine:
    return MetricLine(
        step=step, total_steps=total, epoch=0, ends_epoch=ends_epoch, loss=1.0, learning_rate=0.1, images_per_second=99
    )


RUNS = [(1, "a, 1 rank", 1), (1, "a, 2 ranks", 2), (1, "b, 1 rank", 1), (1, "b, 2 ranks", 2)]


def test_a_comparison_shows_a_line_a_run_and_the_time_left_once_it_is_known(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    began = clock.now
    clock.now += 70  # the proof, which says nothing about the runs
    with ComparisonProgress(RUNS, shared=True, began=began, clock=clock) as progress:
        see = progress.watch("a, 1 rank")
        for step in range(1, 9):
            clock.now += 5
            see(_line(step, 8))
        see = progress.watch("a, 2 ranks")
        for step in range(1, 9):
            clock.now += 2.5
            see(_line(step, 8))
        progress.watch("b, 1 rank")
        clock.now += 40
        progress.watch("b, 2 ranks")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[ 1:10] run 1/4: a, 1 rank"
    assert lines[1].startswith("[ 1:15] run 1/4: a, 1 rank: step 1/8, 99 images/s, loss 1.000"), "the first estimate"
    assert [line.partition(" (")[0] for line in lines[2:]] == [
        "[ 1:50] run 2/4: a, 2 ranks", "[ 2:10] run 3/4: b, 1 rank", "[ 2:50] run 4/4: b, 2 ranks",
    ]  # fmt: skip
    lefts = [_left_s(line) for line in lines[1:]]
    assert lefts == sorted(lefts, reverse=True)
    assert 60 <= lefts[2] <= 70 and 20 <= lefts[3] <= 30, "60 s and 20 s were left, and ends take their share"


def test_a_long_run_of_a_comparison_is_not_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ComparisonProgress(RUNS, shared=True, clock=clock) as progress:
        see = progress.watch("a, 1 rank")
        for step in range(1, 101):
            clock.now += SILENCE_S / 4
            see(_line(step, 100))
    assert len(capsys.readouterr().err.splitlines()) == 2 + 24  # the run, its first epoch, then each fourth


def test_runs_that_are_kept_take_no_time(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    rounds = [(number, title, ranks) for number in (1, 2) for _, title, ranks in RUNS[:2]]
    with ComparisonProgress(rounds, shared=False, clock=clock) as progress:
        progress.watch("a, 1 rank", 2)
        clock.now += 30
        progress.watch("a, 2 ranks", 2)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "[ 0:00] run 3/4: a, 1 rank, round 2/2",
        "[ 0:30] run 4/4: a, 2 ranks, round 2/2 (about 30 s left)",
    ]


def test_a_comparison_shows_its_bars_on_a_terminal(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Console, "is_terminal", property(lambda console: True))
    with ComparisonProgress(RUNS, shared=True, clock=clock) as progress:
        progress._console.file = shown = io.StringIO()
        see = progress.watch("a, 1 rank")
        clock.now += 50
        see(_line(4, 8))
        see = progress.watch("a, 2 ranks")
    for text in ("a, 2 ranks", "all runs", "left"):
        assert text in shown.getvalue(), text


def test_the_stages_of_a_proof_are_counted(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with StageProgress("parity", 3, clock=clock) as stages:
        for stage in ("one", "two", "three"):
            stages.begin(stage)
            clock.now += 15
    assert capsys.readouterr().err.splitlines() == [
        "[ 0:00] parity 1/3: one",
        "[ 0:15] parity 2/3: two (about 30 s left)",
        "[ 0:30] parity 3/3: three (about 20 s left)",
    ]


def test_a_run_shows_the_time_left_once_it_is_known(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(["a"], clock=clock) as progress:
        clock.now += 60  # of start-up, which says nothing about the steps
        see = progress.watch("a")
        for step in range(10, 101, 10):
            see(_line(step, 100, ends_epoch=step % 20 == 0))
            clock.now += 10
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "a: step 20/100, 99 images/s, loss 1.000, rate 0.1 (about 80 s left)"
    assert lines[-1] == "a: step 100/100, 99 images/s, loss 1.000, rate 0.1", "nothing is left"


def test_a_warning_comes_before_the_line_that_brings_it(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(["a"], clock=clock) as progress:
        progress.watch("a")(_line(1, 100).model_copy(update={"warnings": ["loss: odd", "samples: NaN"]}))
    assert capsys.readouterr().err.splitlines() == [
        "warning: loss: odd",
        "warning: samples: NaN",
        "a: step 1/100, 99 images/s, loss 1.000, rate 0.1",
    ]


def test_the_steps_before_a_resumed_run_took_no_time(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(["a"], clock=clock) as progress:
        see = progress.watch("a")
        see(_line(500, 1000))
        clock.now += 10
        see(_line(600, 1000))
    assert _left_s(capsys.readouterr().err.splitlines()[-1]) == 40


IN_A_TERMINAL = """
import sys
from rich.console import Console
from hvdkit.report.progress import ComparisonProgress, RunProgress, StageProgress
from hvdkit.results.train import MetricLine
from hvdkit.runtimes.progress import BuildProgress

class Clock:
    now = 0.0
    def __call__(self):
        return self.now

clock = Clock()

def train(see):
    for step in (10, 20, 30):
        see(MetricLine(step=step, total_steps=40, epoch=0, loss=1.0, learning_rate=0.1, images_per_second=99))
        clock.now += 100

if sys.argv[1] == "train":
    with RunProgress(["one run"], clock=clock) as progress:
        train(progress.watch("one run"))
if sys.argv[1] == "compare":
    with ComparisonProgress([(1, "one run", 1), (1, "another", 1)], shared=True, clock=clock) as progress:
        train(progress.watch("one run"))
        train(progress.watch("another"))
if sys.argv[1] == "parity":
    with StageProgress("parity", 2, clock=clock) as progress:
        for stage in ("another", "one run"):
            progress.begin(stage)
            clock.now += 200
if sys.argv[1] == "build":
    with BuildProgress(Console(stderr=True), ["mxnet"], clock) as progress:
        progress.stage("mxnet", "create", "one run")
"""


@pytest.mark.parametrize("command", ["train", "compare", "parity", "build"])
def test_all_show_bars_with_the_time_left_in_a_terminal(command: str) -> None:
    shown = in_terminal([sys.executable, "-c", IN_A_TERMINAL, command])
    assert "one run" in shown and "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in shown, shown
    assert re.search(r"\d%.*\d:\d\d:\d\d.*about \d+ (s|min) left", shown), shown
    assert "\x1b[?25l" in shown and "\x1b[?25h" in shown, "the cursor is hidden, and comes back"


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_a_real_run_shows_its_bar_in_a_terminal(tmp_path: Path, recipe: Path) -> None:
    words = ["train", str(recipe), "--framework", "mxnet", "--out", str(tmp_path / "run"), "steps=20", "log_every=1"]
    shown = in_terminal([sys.executable, "-m", "hvdkit", *words])
    assert re.search(r"mxnet, 1 rank .*\d+%.*step 20/20, \d+ images/s", shown), shown
    assert "left" in shown and "written to" in shown


def in_terminal(command: list[str]) -> str:
    """What a command shows in a terminal of 160 columns."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment | {"TERM": "xterm-256color"})
    os.close(its)
    shown = b""
    with contextlib.suppress(OSError):  # EIO is the end: nobody has it open any more
        while data := os.read(ours, 65536):
            shown += data
    os.close(ours)
    assert process.wait() == 0, shown.decode()
    return shown.decode()
