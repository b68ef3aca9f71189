"""How all commands show the progress of long work: bars on a terminal, elsewhere lines with the time left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hvdkit.time_left import minutes


class Bars:
    """A bar for each part of the work, as a context manager: name, share, time since its start, and a text.

    `began` is when the command started, by `clock`. In a notebook the bars are a cell's output. Elsewhere there are
    none without a terminal, and `_print` is for lines.
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

    def __enter__(self) -> Self:
        if self._console.is_jupyter:
            from IPython.display import display

            self._cell = display(self._bars, display_id=True)
        else:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
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
        print(f"{time_}{_with(line, left)}", file=self._console.file, flush=True)


def _with(text: str, left: str) -> str:
    return f"{text} ({left})" if left else text
