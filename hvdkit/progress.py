"""The progress of long work, by rich: bars on a terminal or in a notebook, elsewhere lines with the time left."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars

# Without bars, a line about the work is printed after this many seconds without one.
SILENCE_S = 60.0
_BEAT_S = 5.0  # how often a thread looks whether it is time for such a line


class ProgressDisplay:
    """Shows work whose parts, (row, key), have relative costs: a bar for each row, and with `total` one for all of it.

    `began` is when the command started, by `clock`. Where there are no bars `say` prints lines, and a thread prints
    what is `at_work`, by row, after each minute without a line. Threads can share it; it is a context manager.
    """

    def __init__(
        self,
        costs: Mapping[tuple[str, Any], float],
        total: str = "",
        console: Console | None = None,
        began: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._live = self._console.is_terminal or self._console.is_jupyter
        self._cell: Any = None  # the output in a notebook, which rich alone would show with ipywidgets only
        self._bars = Bars(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=self._console,
            disable=not self._live,
        )
        self._costs, self._done = dict(costs), dict.fromkeys(costs, 0.0)
        rows = dict.fromkeys(row for row, _ in costs)
        self._rows = {row: self._bars.add_task(row, start=False, total=1.0, text="") for row in rows}
        self._all = self._bars.add_task(total, total=1.0, text="") if total else None
        self._clock, self._began = clock, clock() if began is None else began
        self._timed_from = clock(), 0.0
        self.at_work: dict[str, str] = {}
        self._lock = threading.RLock()
        self._printed_s = clock()
        self._ended = threading.Event()
        self._beats = threading.Thread(target=self._beat_until_ended, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if not self._live:
            self._beats.start()
        if self._console.is_jupyter:
            from IPython.display import display

            self._cell = display(self._bars, display_id=True)
        else:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._beats.is_alive():
            self._beats.join()
        if self._cell is None:
            self._bars.stop()

    def done(self, part: tuple[str, Any], share: float = 1.0) -> None:
        """The share of the part, 0 to 1, is done."""
        self._done[part] = max(share, self._done[part])

    def drop(self, part: tuple[str, Any]) -> None:
        """Leave out what is left of the part: it exists already, or it failed."""
        self._costs[part] *= self._done[part]
        self._done[part] = 1.0

    def time_from_now(self) -> None:
        """Estimate the time left from the speed from now on."""
        self._timed_from = self._clock(), self._sums()[0]

    def left(self) -> str:
        """Such as `about 4 min left`, at the speed so far; empty if that is unknown, or nothing is left."""
        (done, costs), (since, before) = self._sums(), self._timed_from
        return about((self._clock() - since) * (costs - done) / (done - before)) if done > before else ""

    def _sums(self, row: str | None = None) -> tuple[float, float]:
        """The cost of what is done, and of all of it; of one row, or of all."""
        parts = [part for part in self._costs if row in (None, part[0])]
        return sum(self._costs[part] * self._done[part] for part in parts), sum(self._costs[part] for part in parts)

    def show(self, row: str, text: str) -> None:
        """Bring the row's bar, with a text, and that of all up to date."""
        with self._lock:
            for bar, of, beside in ((self._rows[row], row, text), (self._all, None, self.left())):
                if bar is not None:
                    done, costs = self._sums(of)
                    self._bars.start_task(bar)
                    self._bars.update(bar, completed=done / costs if costs else 1.0, text=beside)
            if self._cell is not None:
                self._cell.update(self._bars)

    def say(self, line: str, timed: bool = True) -> None:
        """Where there are no bars, print a line with the time since the start and the time left."""
        if not self._live:
            left = self.left()
            self._print(f"{line} ({left})" if left else line, timed)

    def _print(self, line: str, timed: bool = False) -> None:
        passed = int(self._clock() - self._began)
        with self._lock:
            self._console.file.write((f"[{passed // 60:2d}:{passed % 60:02d}] " if timed else "") + f"{line}\n")
            self._console.file.flush()
            self._printed_s = self._clock()

    def beat(self) -> None:
        """Print a line about what is at work, if nothing has been printed for a while."""
        with self._lock:
            if self.at_work and self._clock() - self._printed_s >= SILENCE_S:
                self.say("; ".join(self.at_work.values()))

    def _beat_until_ended(self) -> None:
        while not self._ended.wait(_BEAT_S):
            self.beat()


def about(seconds: float) -> str:
    """A time left in words, rounded like an estimate; empty if it is none."""
    if seconds < 1:
        return ""
    if seconds < 90:
        return f"about {10 * math.ceil(round(seconds) / 10)} s left"
    return f"about {round(seconds / 60)} min left"
