"""What a build tells while it works: a bar for each runtime on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class BuildProgress:
    """Shows each runtime's stage; a context manager. May be told things from several threads."""

    def __init__(self, console: Console, names: list[str]) -> None:
        self._console = console
        self._started = time.monotonic()
        self._bars: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        if console.is_terminal:
            self._bars = Progress(
                SpinnerColumn(finished_text="[green]✓"),
                TextColumn("{task.fields[name]:<10}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeElapsedColumn(),
                TextColumn("{task.description}"),
                console=console,
            )
            for name in names:
                self._tasks[name] = self._bars.add_task("waiting", name=name, total=100, start=False)

    def __enter__(self) -> BuildProgress:
        if self._bars:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars:
            self._bars.stop()

    def stage(self, name: str, text: str, percent: float) -> None:
        """The runtime `name` has entered a stage; `percent` of all its work lies behind it."""
        if self._bars:
            self._bars.start_task(self._tasks[name])
            self._bars.update(self._tasks[name], description=text, completed=percent)
        else:
            self._console.print(f"[{self._elapsed()}] {name}: {text}", markup=False, highlight=False, soft_wrap=True)

    def advance(self, name: str, percent: float) -> None:
        """The runtime is further inside its stage; said on a terminal only."""
        if self._bars:
            self._bars.update(self._tasks[name], completed=percent)

    def end(self, name: str, text: str, good: bool) -> None:
        """The runtime is done, for good or ill."""
        if self._bars:
            style = "green" if good else "red"
            self._bars.update(self._tasks[name], description=f"[{style}]{text}", completed=100 if good else None)
            self._bars.stop_task(self._tasks[name])
        else:
            self.stage(name, text, 100)

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes:2d}:{seconds:02d}"
