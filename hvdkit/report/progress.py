"""What a waiting user sees: bars on a terminal, a plain line an epoch elsewhere."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hvdkit.results import MetricLine


class RunProgress:
    """Progress of runs by their titles, on standard error; with several rounds each title's bar begins anew in each."""

    def __init__(self, titles: list[str], rounds: int = 1) -> None:
        self._console = Console(stderr=True)
        self._rounds = rounds
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[told]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks = {title: self._progress.add_task(title, total=None, start=False, told="") for title in titles}

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def watch(self, title: str, number: int = 1) -> Callable[[MetricLine], None]:
        """What sees the metric lines of the run in that round, which begins now."""
        task = self._tasks[title]
        if self._rounds > 1:
            title = f"{title}, round {number}/{self._rounds}"
            self._progress.reset(task, start=False, total=None, description=title, told="")

        def see(line: MetricLine) -> None:
            accuracy = "" if line.val_accuracy is None else f", accuracy {line.val_accuracy:.4f}"
            told = (
                f"{line.images_per_second:.0f} images/s, loss {line.loss:.3f}, rate {line.learning_rate:.3g}{accuracy}"
            )
            if self._console.is_terminal:
                self._progress.start_task(task)
                self._progress.update(task, completed=line.step, total=line.total_steps, told=told)
            elif line.ends_epoch:
                print(f"{title}: step {line.step}/{line.total_steps}, {told}", file=self._console.file, flush=True)

        return see


class StageProgress:
    """Progress of work in named stages that tell nothing of their inside: a bar of stages, a plain line elsewhere."""

    def __init__(self, title: str, stages: int) -> None:
        self._title, self._console = title, Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task(title, total=stages)
        self._begun = 0

    def __enter__(self) -> StageProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, stage: str) -> None:
        """The stage before has ended and this one begins."""
        if self._console.is_terminal:
            self._progress.update(self._task, completed=self._begun, description=f"{self._title}: {stage}")
        else:
            print(f"{self._title}: {stage}", file=self._console.file, flush=True)
        self._begun += 1
