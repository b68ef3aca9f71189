"""What a waiting user sees of builds and comparisons, and how the time left is estimated, by a clock of the test's."""

from __future__ import annotations

import io
import os
import time
from itertools import pairwise

import hygiene
import pytest
from paced_clock import Clock, left_s, line
from rich.console import Console

from hvdkit import bars
from hvdkit.report.progress import ComparisonProgress, RunProgress, StageProgress
from hvdkit.runtimes import pins
from hvdkit.runtimes import progress as building
from hvdkit.runtimes.progress import COMPILE, CREATE, INSTALL, PROVE, BuildProgress
from hvdkit.time_left import TimeLeft, about

pytestmark = pytest.mark.check


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
    assert building.COSTS.keys() == {*pins.ALL, "horovod"}
    for name, costs in building.COSTS.items():
        assert list(costs) == ([CREATE, INSTALL] if name in pins.ALL else []) + [COMPILE, PROVE], name
        assert min(costs.values()) > 0, name


def _build(clock: Clock, names: list[str], terminal: bool = False) -> tuple[BuildProgress, io.StringIO]:
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
    assert lines[0].startswith("[ 0:00] mxnet: at create (about ")
    assert lines[1].startswith("[ 0:04] pytorch: at create (about ")
    lefts = [left_s(line) for line in lines[:8]]
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
    see(line(1, 9, ends_epoch=False))
    clock.now += 60
    see(line(2, 9, ends_epoch=False))
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
        until = time.monotonic() + hygiene.patience(20)
        while shown.getvalue().count("still at it") < 2 and time.monotonic() < until:
            time.sleep(0.01)
    assert shown.getvalue().count("mxnet: compiling, still at it") >= 2
    lines = len(shown.getvalue().splitlines())
    time.sleep(0.1)
    assert len(shown.getvalue().splitlines()) == lines, "it has ended"


def test_a_wheel_from_the_cache_and_a_failed_runtime_take_no_more_time(clock: Clock) -> None:
    progress, shown = _build(clock, ["mxnet", "pytorch"])
    progress.stage("mxnet", COMPILE, "compiling")
    before = left_s(shown.getvalue().splitlines()[-1])
    progress.skip("mxnet")
    progress.waits("pytorch", "waiting")
    assert left_s(shown.getvalue().splitlines()[-1]) < before
    progress.end("pytorch", "failed", good=False)
    progress.stage("mxnet", PROVE, "proving")
    assert left_s(shown.getvalue().splitlines()[-1]) <= 20
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
