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

    `began` is when the command started, by `clock`. Without a terminal there are no bars, and `_print` is for lines.
    """

    def __init__(
        self, console: Console, began: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._clock, self._began = clock, clock() if began is None else began

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def _add(self, name: str, text: str = "", start: bool = True) -> TaskID:
        return self._bars.add_task(name, total=1.0, text=text, start=start)

    def _show(self, bar: TaskID, share: float | None = None, **fields: Any) -> None:
        """Set a bar's share, 0 to 1, and its `description` or `text`; it starts if it has not yet."""
        self._bars.start_task(bar)
        self._bars.update(bar, completed=share, **fields)

    def _print(self, line: str, left: str = "", timed: bool = True) -> None:
        """Print a line, with the time since the start and the time left."""
        time_ = f"[{minutes(self._clock() - self._began)}] " if timed else ""
        print(f"{time_}{_with(line, left)}", file=self._console.file, flush=True)


def _with(text: str, left: str) -> str:
    return f"{text} ({left})" if left else text
