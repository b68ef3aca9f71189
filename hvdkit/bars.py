"""How all commands show the progress of long work: bars on a terminal, elsewhere lines with the time left."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hvdkit.time_left import minutes

# Without bars, a line about the work is printed after this many seconds without one.
SILENCE_S = 60.0
_BEAT_S = 5.0  # how often a thread looks whether it is time for such a line


class Bars:
    """A bar for each part of the work, as a context manager: name, share, time since its start, and a text.

    `began` is when the command started, by `clock`. In a notebook the bars are a cell's output. Elsewhere there are
    none without a terminal, and `_print` is for lines; a thread prints one after each minute without one.
    """

    def __init__(
        self, console: Console, began: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._live = console.is_terminal or console.is_jupyter
        self._cell: Any = None  # the output in a notebook, which rich alone would show with ipywidgets only
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not self._live,
        )
        self._clock, self._began = clock, clock() if began is None else began
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

    def _add(self, name: str, text: str = "", start: bool = True) -> TaskID:
        return self._bars.add_task(name, total=1.0, text=text, start=start)

    def _show(self, bar: TaskID, share: float | None = None, **fields: Any) -> None:
        """Set a bar's share, 0 to 1, and its `description` or `text`; it starts if it has not yet."""
        self._bars.start_task(bar)
        self._bars.update(bar, completed=share, **fields)
        if self._cell is not None:
            self._cell.update(self._bars)

    def _print(self, line: str, left: str = "", timed: bool = True) -> None:
        """Print a line, with the time since the start and the time left."""
        time_ = f"[{minutes(self._clock() - self._began)}] " if timed else ""
        with self._lock:
            self._console.file.write(f"{time_}{_with(line, left)}\n")
            self._console.file.flush()
            self._printed_s = self._clock()

    def _at_work(self) -> tuple[str, str]:
        """What is at work, for a line of its own, and the time left; both empty if there is nothing to say."""
        return "", ""

    def beat(self) -> None:
        """Print a line about what is at work, if nothing has been printed for a while."""
        with self._lock:
            line, left = self._at_work() if self._clock() - self._printed_s >= SILENCE_S else ("", "")
            if line:
                self._print(line, left)

    def _beat_until_ended(self) -> None:
        while not self._ended.wait(_BEAT_S):
            self.beat()


def _with(text: str, left: str) -> str:
    return f"{text} ({left})" if left else text
