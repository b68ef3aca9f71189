"""What a waiting user sees: bars on a terminal and in a notebook; elsewhere a line for each epoch, run or stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console

from hvdkit.bars import SILENCE_S, Bars
from hvdkit.results.train import MetricLine, shown_scores
from hvdkit.time_left import TimeLeft

# Start and end of a run take this share of the time of a run with one rank, whatever the number of ranks.
FIXED = 0.15


class RunProgress(Bars):
    """Progress of runs, by their titles. Each of several rounds starts the bars anew."""

    def __init__(
        self,
        titles: list[str],
        rounds: int = 1,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(Console(stderr=True), began, clock)
        self._rounds = rounds
        self._now = ("", "", "")  # the current run's title, its state, and the time left
        self._runs = {title: self._add(title, start=False) for title in titles}

    def watch(self, title: str, number: int = 1) -> Callable[[MetricLine], None]:
        """Begin the run of that round; returns what its metric lines are passed to."""
        bar = self._runs[title]
        if self._rounds > 1:
            title = f"{title}, round {number}/{self._rounds}"
            self._bars.reset(bar, start=False, description=title, text="")
        first: int | None = None  # the first step that is reported: what came before was start-up, or an earlier run
        left = TimeLeft({})
        self._now = (title, "starting", "")

        def see(line: MetricLine) -> None:
            nonlocal first, left
            if first is None:
                first, left = line.step, TimeLeft({title: 1.0}, clock=self._clock)
            left.done(title, (line.step - first) / max(1, line.total_steps - first))
            for warning in line.warnings or []:
                self._print(f"warning: {warning}", timed=False)
            scores = shown_scores(line.validation, line.average_validation)
            speed = f"{line.images_per_second:.0f} {line.unit}/s"
            step = f"step {line.step}/{line.total_steps}"
            text = f"{step}, {speed}, loss {line.loss:.3f}, rate {line.learning_rate:.3g}{scores}"
            self._now = (title, text, left.text())
            if self._live:
                self._show(bar, line.step / line.total_steps, text=", ".join(filter(None, [text, left.text()])))
            elif line.ends_epoch:
                self._report(title, text, left.text())

        return see

    def _at_work(self) -> tuple[str, str]:
        title, text, left = self._now
        return (f"{title}: {text}" if title else ""), left

    def _report(self, title: str, text: str, left: str) -> None:
        self._print(f"{title}: {text}", left, timed=False)


class ComparisonProgress(RunProgress):
    """Progress of a comparison: the current run, and the time left for all runs.

    `runs` are (round, title, ranks) in the order in which they run. `shared` is whether the ranks of a run share its
    work, so that more ranks take less time. Without a terminal there is a line for each run, and one after each minute
    without a line.
    """

    def __init__(
        self,
        runs: Sequence[tuple[int, str, int]],
        shared: bool,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        titles = list(dict.fromkeys(title for _, title, _ in runs))
        super().__init__(titles, max(number for number, _, _ in runs), began, clock)
        self._costs = {(number, title): 1 / (ranks if shared else 1) + FIXED for number, title, ranks in runs}
        self._parts = list(self._costs)
        self._left = TimeLeft(self._costs, clock=clock)
        self._place: int | None = None  # of the current run
        self._promised = False
        self._all = self._add("all runs")

    def watch(self, title: str, number: int = 1) -> Callable[[MetricLine], None]:
        """Begin the run of that round, after all runs before it; returns what its metric lines are passed to."""
        part = (number, title)
        index = self._parts.index(part)
        if self._place is None:
            self._left = TimeLeft(self._costs, clock=self._clock)  # the parity check's time says nothing about the runs
        else:
            self._left.done(self._parts[self._place])
        for earlier in self._parts[:index]:
            if not self._left.share(earlier.__eq__):
                self._left.drop(earlier)  # kept from the comparison that is resumed
        self._place = index
        see = super().watch(title, number)
        self._show_all()
        if not self._live:
            self._say("")

        def see_and_count(line: MetricLine) -> None:
            self._left.done(part, 0.99 * line.step / line.total_steps)
            self._show_all()
            see(line)

        return see_and_count

    def _show_all(self) -> None:
        self._show(self._all, self._left.share(), text=self._left.text())

    def _at_work(self) -> tuple[str, str]:
        return ("", "") if self._place is None else (self._line(f": {self._now[1]}"), self._left.text())

    def _report(self, title: str, text: str, left: str) -> None:
        if not self._promised or self._clock() - self._printed_s >= SILENCE_S:
            self._say(f": {text}")

    def _say(self, text: str) -> None:
        left = self._left.text()
        self._print(self._line(text), left)
        self._promised = bool(left)

    def _line(self, text: str) -> str:
        assert self._place is not None
        number, title = self._parts[self._place]
        of_rounds = f", round {number}/{self._rounds}" if self._rounds > 1 else ""
        return f"run {self._place + 1}/{len(self._parts)}: {title}{of_rounds}{text}"


class StageProgress(Bars):
    """Progress of work in named stages of unknown length: a bar of stages, or a line for each stage."""

    def __init__(
        self, title: str, stages: int, began: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(Console(stderr=True), began, clock)
        self._title, self._stages, self._begun, self._now = title, stages, 0, ("", "")
        self._bar = self._add(title)
        self._left = TimeLeft(dict.fromkeys(range(stages), 1.0), clock=clock)

    def _at_work(self) -> tuple[str, str]:
        return self._now

    def begin(self, stage: str) -> None:
        """End the previous stage and begin this one."""
        if self._begun:
            self._left.done(self._begun - 1)
        left = self._left.text()
        name = f"{self._title} {self._begun + 1}/{self._stages}: {stage}"
        self._now = (f"{name}, still at it", left)
        self._show(self._bar, self._left.share(), description=name, text=left)
        if not self._live:
            self._print(name, left)
        self._begun += 1
