"""What is shown while runs work: lines, bars and the time left."""

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
from pathlib import Path

import pytest
from paced_clock import Clock, left_s, line
from rich.console import Console

from hvdkit.report.progress import SILENCE_S, ComparisonProgress, RunProgress, StageProgress

pytestmark = pytest.mark.check


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})  # the usual time is that of two cores
    return Clock()


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
            see(line(step, 8))
        see = progress.watch("a, 2 ranks")
        for step in range(1, 9):
            clock.now += 2.5
            see(line(step, 8))
        progress.watch("b, 1 rank")
        clock.now += 40
        progress.watch("b, 2 ranks")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "[ 1:10] run 1/4: a, 1 rank"
    assert lines[1].startswith("[ 1:15] run 1/4: a, 1 rank: step 1/8, 99 images/s, loss 1.000"), "the first estimate"
    assert [line.partition(" (")[0] for line in lines[2:]] == [
        "[ 1:50] run 2/4: a, 2 ranks", "[ 2:10] run 3/4: b, 1 rank", "[ 2:50] run 4/4: b, 2 ranks",
    ]  # fmt: skip
    lefts = [left_s(line) for line in lines[1:]]
    assert lefts == sorted(lefts, reverse=True)
    assert 60 <= lefts[2] <= 70 and 20 <= lefts[3] <= 30, "60 s and 20 s were left, and ends take their share"


def test_a_long_run_of_a_comparison_is_not_silent(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ComparisonProgress(RUNS, shared=True, clock=clock) as progress:
        see = progress.watch("a, 1 rank")
        for step in range(1, 101):
            clock.now += SILENCE_S / 4
            see(line(step, 100))
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
        see(line(4, 8))
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
            see(line(step, 100, ends_epoch=step % 20 == 0))
            clock.now += 10
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "a: step 20/100, 99 images/s, loss 1.000, rate 0.1 (about 80 s left)"
    assert lines[-1] == "a: step 100/100, 99 images/s, loss 1.000, rate 0.1", "nothing is left"


def test_a_warning_comes_before_the_line_that_brings_it(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(["a"], clock=clock) as progress:
        progress.watch("a")(line(1, 100).model_copy(update={"warnings": ["loss: odd", "samples: NaN"]}))
    assert capsys.readouterr().err.splitlines() == [
        "warning: loss: odd",
        "warning: samples: NaN",
        "a: step 1/100, 99 images/s, loss 1.000, rate 0.1",
    ]


def test_the_steps_before_a_resumed_run_took_no_time(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with RunProgress(["a"], clock=clock) as progress:
        see = progress.watch("a")
        see(line(500, 1000))
        clock.now += 10
        see(line(600, 1000))
    assert left_s(capsys.readouterr().err.splitlines()[-1]) == 40


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
