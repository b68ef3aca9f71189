"""What a waiting user sees: bars on a terminal and in a notebook; elsewhere a line for each epoch, run or stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hvdkit.results.train import MetricLine
from hvdkit.time_left import TimeLeft, minutes

# Start and end of a run take this share of the time of a run with one rank, whatever the number of ranks.
FIXED = 0.15
# A line about the current run is printed after this many seconds without one.
SILENCE_S = 60.0


class _Bars:
    """Progress bars on standard error, if that is a terminal, or as an output of a notebook's cell.

    `began` is when the command started, by `clock`.
    """

    def __init__(
        self, *columns: ProgressColumn, began: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = Console(stderr=True)
        shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *columns)
        self._live = self._console.is_terminal or self._console.is_jupyter
        self._progress = Progress(*shown, console=self._console, disable=not self._live)
        self._cell: Any = None  # the output in a notebook, which rich alone would show with ipywidgets only
        self._clock, self._began = clock, clock() if began is None else began

    def __enter__(self) -> Self:
        if self._console.is_jupyter:
            from IPython.display import display

            self._cell = display(self._progress, display_id=True)
        else:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._cell is None:
            self._progress.stop()

    def _update(self, task: TaskID, **changes: Any) -> None:
        self._progress.update(task, **changes)
        if self._cell is not None:
            self._cell.update(self._progress)

    def _print(self, line: str) -> None:
        print(line, file=self._console.file, flush=True)

    def _print_timed(self, line: str, left: str) -> None:
        self._print(f"[{minutes(self._clock() - self._began)}] {line}{f' ({left})' if left else ''}")


class RunProgress(_Bars):
    """Progress of runs, by their titles. Each of several rounds starts the bars anew."""

    def __init__(
        self,
        titles: list[str],
        rounds: int = 1,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        columns = TextColumn("{task.fields[text]}"), TimeElapsedColumn(), TimeRemainingColumn()
        super().__init__(*columns, began=began, clock=clock)
        self._rounds = rounds
        self._tasks = {title: self._progress.add_task(title, total=None, start=False, text="") for title in titles}

    def watch(self, title: str, number: int = 1) -> Callable[[MetricLine], None]:
        """Begin the run of that round; returns what its metric lines are passed to."""
        task = self._tasks[title]
        if self._rounds > 1:
            title = f"{title}, round {number}/{self._rounds}"
            self._progress.reset(task, start=False, total=None, description=title, text="")

        def see(line: MetricLine) -> None:
            shown = line.validation or {} if line.val_accuracy is None else {"accuracy": line.val_accuracy}
            scores = "".join(f", {name} {value:.4f}" for name, value in shown.items())
            speed = f"{line.images_per_second:.0f} {line.unit}/s"
            text = f"{speed}, loss {line.loss:.3f}, rate {line.learning_rate:.3g}{scores}"
            if self._live:
                self._progress.start_task(task)
                self._update(task, completed=line.step, total=line.total_steps, text=text)
            elif line.ends_epoch:
                self._report(title, f"step {line.step}/{line.total_steps}, {text}")

        return see

    def _report(self, title: str, text: str) -> None:
        self._print(f"{title}: {text}")


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
        self._reported_s, self._promised = 0.0, False
        self._all = self._progress.add_task("all runs", total=len(runs), text="")

    def watch(self, title: str, number: int = 1) -> Callable[[MetricLine], None]:
        """Begin the run of that round, after all runs before it; returns what its metric lines are passed to."""
        part = (number, title)
        place = self._parts.index(part)
        if self._place is None:
            self._left = TimeLeft(self._costs, clock=self._clock)  # the parity check's time says nothing about the runs
        else:
            self._left.done(self._parts[self._place])
        for earlier in self._parts[:place]:
            if not self._left.share(earlier.__eq__):
                self._left.drop(earlier)  # kept from the comparison that is resumed
        self._place = place
        see = super().watch(title, number)
        if self._live:
            self._update(self._all, completed=place, text=self._left.text())
        else:
            self._say("")

        def see_and_count(line: MetricLine) -> None:
            self._left.done(part, 0.99 * line.step / line.total_steps)
            if self._live:
                self._progress.update(self._all, text=self._left.text())
            see(line)

        return see_and_count

    def _report(self, title: str, text: str) -> None:
        if not self._promised or self._clock() - self._reported_s >= SILENCE_S:
            self._say(f": {text}")

    def _say(self, text: str) -> None:
        assert self._place is not None
        number, title = self._parts[self._place]
        of_rounds = f", round {number}/{self._rounds}" if self._rounds > 1 else ""
        left = self._left.text()
        self._print_timed(f"run {self._place + 1}/{len(self._parts)}: {title}{of_rounds}{text}", left)
        self._reported_s, self._promised = self._clock(), bool(left)


class StageProgress(_Bars):
    """Progress of work in named stages of unknown length: a bar of stages, or a line for each stage."""

    def __init__(
        self, title: str, stages: int, began: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(TimeElapsedColumn(), TextColumn("{task.fields[left]}"), began=began, clock=clock)
        self._title, self._stages, self._begun = title, stages, 0
        self._task = self._progress.add_task(title, total=stages, left="")
        self._left = TimeLeft(dict.fromkeys(range(stages), 1.0), clock=clock)

    def begin(self, stage: str) -> None:
        """End the previous stage and begin this one."""
        if self._begun:
            self._left.done(self._begun - 1)
        left = self._left.text()
        if self._live:
            description = f"{self._title}: {stage}"
            self._update(self._task, completed=self._begun, description=description, left=left)
        else:
            self._print_timed(f"{self._title} {self._begun + 1}/{self._stages}: {stage}", left)
        self._begun += 1
