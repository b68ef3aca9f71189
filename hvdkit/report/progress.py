"""What a waiting user sees: bars on a terminal and in a notebook; elsewhere a line for each epoch, run or stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hvdkit.progress import SILENCE_S, ProgressDisplay
from hvdkit.results.train import MetricLine, shown_scores

# Start and end of a run take this share of the time of a run with one rank, whatever the number of ranks.
FIXED = 0.15


class RunProgress(ProgressDisplay):
    """ProgressDisplay of one run or of many, `runs`: (round, title, ranks) in the order in which they run.

    `shared` is whether the ranks of a run share its work, so that more ranks take less time. Without a terminal a run
    has a line for each epoch; of many, each has one line, and one after each minute without a line.
    """

    def __init__(
        self,
        runs: Sequence[tuple[int, str, int]],
        shared: bool = True,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        costs = {(title, number): 1 / (ranks if shared else 1) + FIXED for number, title, ranks in runs}
        super().__init__(costs, "all runs" if len(runs) > 1 else "", None, began, clock)
        self._order, self._rounds = list(costs), max(number for number, _, _ in runs)
        self._place: int | None = None  # of the current run
        self._promised = False  # whether a line has told the time left

    def watch(self, title: str, number: int = 1) -> Callable[[MetricLine], None]:
        """Begin the run of that round, after all runs before it; returns what its metric lines are passed to."""
        part, many = (title, number), len(self._order) > 1
        if self._place is None:
            self.time_from_now()  # a parity check's time says nothing about the runs
        else:
            self.done(self._order[self._place])
        self._place = self._order.index(part)
        for earlier in self._order[: self._place]:
            if not self._done[earlier]:
                self.drop(earlier)  # kept from the comparison that is resumed
        name = title + (f", round {number}/{self._rounds}" if self._rounds > 1 else "")
        name = f"run {self._place + 1}/{len(self._order)}: {name}" if many else name
        self.at_work = {title: f"{name}: starting"}
        self.show(title, "starting")
        if many:
            self._tell(name)
        first: int | None = None  # the first step that is reported: what came before was start-up, or an earlier run

        def see(line: MetricLine) -> None:
            nonlocal first
            if first is None:
                first = 0 if many else line.step
                if not many:
                    self.time_from_now()
            self.done(part, (0.99 if many else 1) * (line.step - first) / max(1, line.total_steps - first))
            for warning in line.warnings or []:
                self._print(f"warning: {warning}")
            scores = shown_scores(line.validation, line.average_validation)
            text = f"step {line.step}/{line.total_steps}, {line.images_per_second:.0f} {line.unit}/s, "
            text += f"loss {line.loss:.3f}, rate {line.learning_rate:.3g}{scores}"
            self.at_work = {title: f"{name}: {text}"}
            self.show(title, text if many else ", ".join(filter(None, [text, self.left()])))
            if line.ends_epoch and not many:
                self.say(f"{name}: {text}", timed=False)
            elif line.ends_epoch and (not self._promised or self._clock() - self._printed_s >= SILENCE_S):
                self._tell(f"{name}: {text}")

        return see

    def _tell(self, text: str) -> None:
        self.say(text)
        self._promised = bool(self.left())


class StageProgress(ProgressDisplay):
    """ProgressDisplay of work in stages of about the same length: a bar, or a line for each stage."""

    def __init__(
        self, title: str, stages: int, began: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__({(title, number): 1.0 for number in range(stages)}, "", None, began, clock)
        self._title, self._begun = title, 0

    def begin(self, stage: str) -> None:
        """End the previous stage and begin this one."""
        if self._begun:
            self.done((self._title, self._begun - 1))
        self._begun += 1
        count = f"{self._begun}/{len(self._costs)}: {stage}"
        self.at_work = {self._title: f"{self._title} {count}, still at it"}
        self.show(self._title, ", ".join(filter(None, [count, self.left()])))
        self.say(f"{self._title} {count}")
