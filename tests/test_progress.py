"""What a waiting user sees of builds, runs and comparisons, by a clock of the test's."""

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
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from hvdkit import progress as showing
from hvdkit.progress import SILENCE_S, ProgressDisplay, about
from hvdkit.report.progress import RunProgress, StageProgress
from hvdkit.runtimes import pins
from hvdkit.runtimes import progress as building
from hvdkit.runtimes.progress import COMPILE, CREATE, INSTALL, PROVE, BuildProgress
from tests import hygiene
from tests.paced_clock import Clock, left_s, line

Read = pytest.CaptureFixture[str]
RUNS = [(1, "a, 1 rank", 1), (1, "a, 2 ranks", 2), (1, "b, 1 rank", 1), (1, "b, 2 ranks", 2)]
STEP = "loss 1.000, rate 0.1"

pytestmark = pytest.mark.check


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_time_left_follows_the_speed_so_far_and_what_is_dropped_needs_none(clock: Clock) -> None:
    work = ProgressDisplay({("a", 1): 1, ("a", 2): 3, ("b", 1): 50}, clock=clock)
    work.drop(("b", 1))
    clock.now += 10
    assert work.left() == "", "nothing is done"
    work.done(("a", 1))
    assert work.left() == "about 30 s left"
    clock.now += 10
    work.done(("a", 2), 0.5)
    work.done(("a", 2), 0.4)  # a late report of less takes nothing back
    assert work.left() == "about 20 s left"
    work.time_from_now()
    clock.now += 40
    work.done(("a", 2), 0.75)
    assert work.left() == "about 40 s left"
    work.done(("a", 2))
    assert work.left() == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, ""), (3, "about 10 s left"), (41, "about 50 s left"), (89, "about 90 s left"), (95, "about 2 min left")],
)
def test_an_estimate_is_rounded(seconds: float, words: str) -> None:
    assert about(seconds) == words


def test_every_runtime_has_costs_for_every_stage() -> None:
    assert building.COSTS.keys() == {*pins.ALL, "horovod"}
    for name, costs in building.COSTS.items():
        assert list(costs) == ([CREATE, INSTALL] if name in pins.ALL else []) + [COMPILE, PROVE], name
        assert min(costs.values()) > 0, name


def _build(clock: Callable[[], float], names: list[str], terminal: bool = False) -> tuple[BuildProgress, io.StringIO]:
    shown = io.StringIO()
    return BuildProgress(Console(file=shown, force_terminal=terminal, width=120), names, clock), shown


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
    assert [line.partition(" (")[0] for line in lines[:2]] == ["[ 0:00] mxnet: at create", "[ 0:04] pytorch: at create"]
    lefts = [left_s(line) for line in lines[3:8]]
    assert all(later <= sooner + 60 for sooner, later in pairwise(lefts)), lefts
    assert lefts[-1] <= 30, "the last stages of both are 21 s"
    assert lines[-1].endswith(": ready: two"), "nothing is left"


def test_a_build_says_what_is_at_work_after_a_minute(clock: Clock) -> None:
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
    (said,) = shown.getvalue().splitlines()[2:]
    at_work = "mxnet: installing the framework, still at it; pytorch: compiling Horovod, 43%"
    assert said.startswith(f"[ 1:00] {at_work} (about")
    progress.end("mxnet", "failed", good=False)
    progress.end("pytorch", "ready", good=True)
    clock.now += 60
    progress.beat()
    assert shown.getvalue().splitlines()[-1] == "[ 1:00] pytorch: ready", "nothing is at work"


def test_what_is_cached_failed_or_made_by_another_build_takes_no_time(clock: Clock) -> None:
    progress, shown = _build(clock, ["mxnet", "pytorch", "tensorflow"])
    progress.stage("mxnet", COMPILE, "compiling")
    clock.now += 28
    progress.skip("mxnet")
    progress.waits("pytorch", "waiting")
    before = left_s(shown.getvalue().splitlines()[-1])
    progress.end("pytorch", "made by another build", good=True)
    assert left_s(shown.getvalue().splitlines()[-1]) < before
    progress.end("tensorflow", "failed", good=False)
    progress.stage("mxnet", PROVE, "proving")
    assert left_s(shown.getvalue().splitlines()[-1]) <= 20
    progress.end("mxnet", "ready", good=True)
    assert shown.getvalue().splitlines()[-1] == "[ 0:28] mxnet: ready"


def test_a_terminal_shows_a_bar_a_runtime_and_one_for_all(clock: Clock) -> None:
    progress, shown = _build(clock, ["mxnet", "pytorch"], terminal=True)
    with progress:
        progress.stage("mxnet", COMPILE, "compiling Horovod")
        clock.now += 10
        progress.advance("mxnet", 0.5)
        progress.end("pytorch", "failed", good=False)
        progress.end("mxnet", "ready", good=True)
    for text in ("mxnet", "pytorch", "all", "ready", "failed"):
        assert text in shown.getvalue(), text


def test_a_thread_prints_the_lines_of_a_silent_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(showing, "SILENCE_S", 0.01)
    monkeypatch.setattr(showing, "_BEAT_S", 0.01)
    progress, shown = _build(time.monotonic, ["mxnet"])
    with progress:
        progress.stage("mxnet", COMPILE, "compiling")
        until = time.monotonic() + hygiene.patience(20)
        while shown.getvalue().count("still at it") < 2 and time.monotonic() < until:
            time.sleep(0.01)
    assert shown.getvalue().count("mxnet: compiling, still at it") >= 2
    lines = len(shown.getvalue().splitlines())
    time.sleep(0.1)
    assert len(shown.getvalue().splitlines()) == lines, "it has ended"


@pytest.mark.parametrize("kind", ["run", "stages", "comparison"])
def test_long_work_is_not_silent(kind: str, clock: Clock, capsys: Read) -> None:
    if kind == "stages":
        stages = StageProgress("parity", 3, clock=clock)
        stages.begin("pytorch")
        progress, expected = stages, "parity 1/3: pytorch, still at it"
    else:
        runs = RunProgress([(1, "a", 1), (2, "a", 1)][: 1 if kind == "run" else 2], clock=clock)
        runs.beat()
        see = runs.watch("a")
        see(line(1, 9, ends_epoch=False))
        title = "a" if kind == "run" else "run 1/2: a, round 1/2"
        progress, expected = runs, f"{title}: step 1/9, 99 images/s, {STEP}"
    capsys.readouterr()
    clock.now += SILENCE_S
    progress.beat()
    assert capsys.readouterr().err.partition(" (")[0].rstrip() == f"[ 1:00] {expected}"


def test_a_comparison_shows_a_line_a_run_and_the_time_left_once_it_is_known(clock: Clock, capsys: Read) -> None:
    began = clock.now
    clock.now += 70  # the parity check, which says nothing about the runs
    with RunProgress(RUNS, began=began, clock=clock) as progress:
        for title, seconds in (("a, 1 rank", 5), ("a, 2 ranks", 2.5)):
            see = progress.watch(title)
            for step in range(1, 9):
                clock.now += seconds
                see(line(step, 8))
        progress.watch("b, 1 rank")
        clock.now += 40
        progress.watch("b, 2 ranks")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[ 1:10] run 1/4: a, 1 rank"
    assert lines[1].startswith(f"[ 1:15] run 1/4: a, 1 rank: step 1/8, 99 images/s, {STEP}"), "the first estimate"
    assert [line.partition(" (")[0] for line in lines[2:]] == [
        "[ 1:50] run 2/4: a, 2 ranks", "[ 2:10] run 3/4: b, 1 rank", "[ 2:50] run 4/4: b, 2 ranks",
    ]  # fmt: skip
    lefts = [left_s(line) for line in lines[1:]]
    assert lefts == sorted(lefts, reverse=True)
    assert 60 <= lefts[2] <= 70 and 20 <= lefts[3] <= 30, "60 s and 20 s were left, and ends take their share"


def test_a_long_run_of_a_comparison_has_a_line_a_minute(clock: Clock, capsys: Read) -> None:
    with RunProgress(RUNS, clock=clock) as progress:
        see = progress.watch("a, 1 rank")
        for step in range(1, 101):
            clock.now += SILENCE_S / 4
            see(line(step, 100))
    assert len(capsys.readouterr().err.splitlines()) == 2 + 24  # the run, its first epoch, then each fourth


def test_runs_that_are_kept_take_no_time(clock: Clock, capsys: Read) -> None:
    rounds = [(number, title, ranks) for number in (1, 2) for _, title, ranks in RUNS[:2]]
    with RunProgress(rounds, shared=False, clock=clock) as progress:
        progress.watch("a, 1 rank", 2)
        clock.now += 30
        progress.watch("a, 2 ranks", 2)
    assert capsys.readouterr().err.splitlines() == [
        "[ 0:00] run 3/4: a, 1 rank, round 2/2",
        "[ 0:30] run 4/4: a, 2 ranks, round 2/2 (about 30 s left)",
    ]


def test_the_stages_of_a_parity_check_are_counted(clock: Clock, capsys: Read) -> None:
    with StageProgress("parity", 3, clock=clock) as stages:
        for stage in ("one", "two", "three"):
            stages.begin(stage)
            clock.now += 15
    assert capsys.readouterr().err.splitlines() == [
        "[ 0:00] parity 1/3: one",
        "[ 0:15] parity 2/3: two (about 30 s left)",
        "[ 0:30] parity 3/3: three (about 20 s left)",
    ]


def test_the_time_left_of_a_run_counts_neither_its_start_nor_earlier_steps(clock: Clock, capsys: Read) -> None:
    with RunProgress([(1, "a", 1)], clock=clock) as progress:
        clock.now += 60
        see = progress.watch("a")
        for step in range(500, 1001, 100):
            warned = line(step, 1000).model_copy(update={"warnings": ["loss: odd"] if step == 500 else None})
            see(warned)
            clock.now += 10
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["warning: loss: odd", f"a: step 500/1000, 99 images/s, {STEP}"]
    assert lines[2] == f"a: step 600/1000, 99 images/s, {STEP} (about 40 s left)"
    assert lines[-1] == f"a: step 1000/1000, 99 images/s, {STEP}", "nothing is left"


IN_A_TERMINAL = """
import sys
from rich.console import Console
from hvdkit.report.progress import RunProgress, StageProgress
from hvdkit.results.train import MetricLine
from hvdkit.runtimes.progress import BuildProgress

class Clock:
    now = 0.0
    def __call__(self):
        return self.now

clock = Clock()
runs = [(1, "one run", 1), (1, "another", 1)]
if sys.argv[1] in ("train", "compare"):
    with RunProgress(runs[: 1 if sys.argv[1] == "train" else 2], clock=clock) as progress:
        see = progress.watch("one run")
        for step in (10, 20, 30):
            see(MetricLine(step=step, total_steps=40, epoch=0, loss=1.0, learning_rate=0.1, images_per_second=99))
            clock.now += 100
if sys.argv[1] == "parity":
    with StageProgress("parity", 2, clock=clock) as progress:
        for stage in ("another", "one run"):
            progress.begin(stage)
            clock.now += 200
if sys.argv[1] == "build":
    with BuildProgress(Console(stderr=True), ["mxnet"], clock) as progress:
        progress.stage("mxnet", "create", "another")
        clock.now += 4
        progress.stage("mxnet", "install", "one run")
"""


@pytest.mark.parametrize("command", ["train", "compare", "parity", "build"])
def test_all_show_bars_with_the_time_left_in_a_terminal(command: str) -> None:
    shown = in_terminal([sys.executable, "-c", IN_A_TERMINAL, command])
    assert "one run" in shown and "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in shown, shown
    assert re.search(r"\d%.*\d:\d\d:\d\d.*about \d+ (s|min) left", shown), shown
    assert "\x1b[?25l" in shown and "\x1b[?25h" in shown, "the cursor is hidden, and comes back"


@pytest.mark.ranks
@pytest.mark.usefixtures("warm")
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
