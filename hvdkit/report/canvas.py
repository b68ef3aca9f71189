"""A chart as the page has it, and what it is drawn on. matplotlib is loaded only when one is drawn."""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hvdkit.baselines.registry import label
from hvdkit.report import plotting, svg
from hvdkit.report.tabular import Table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 420.0  # points; on larger screens several stand side by side
_MARKERS = "os^DvPX*"
_DASHES: list[Any] = ["-", "--", ":", "-."]
_LONGEST = 28  # letters of a label


@dataclass(frozen=True)
class Chart:
    """A drawn chart: `summary` says in words what it shows, `table` has its values.

    `points` are (x, y, text) in the drawing's coordinates, told where a pointer comes near.
    """

    key: str
    title: str
    summary: str
    svg: str
    points: list[tuple[float, float, str]]
    table: Table
    note: str = ""


@dataclass
class Canvas:
    """A figure that is being drawn."""

    figure: Figure
    marks: list[tuple[Axes, float, float, str]] = field(default_factory=list)

    def point(self, axes: Axes, x: float, y: float, text: str) -> None:
        """What a reader is told who comes near (x, y)."""
        self.marks.append((axes, x, y, text))


def load() -> None:
    """Load matplotlib, for all charts and for a process that is forked to draw some of them."""
    with drawing(1.0):  # which says under whose settings matplotlib is imported
        import matplotlib.backends.backend_svg  # noqa: F401


@contextmanager
def drawing(height: float) -> Iterator[Canvas]:
    """An empty figure of a chart's width, so many points high, under the page's settings."""
    with plotting.settings(svg.SETTINGS):
        from matplotlib.figure import Figure

        yield Canvas(Figure(figsize=(WIDTH / 72, height / 72), layout="constrained"))


def finished(canvas: Canvas, key: str, title: str, summary: str, table: Table, note: str = "") -> Chart:
    """The chart of what has been drawn; within `drawing` still, whose settings also rule how it is written."""
    drawn = svg.inline(canvas.figure, f"{key}-")  # lays out, so that places are final
    height = canvas.figure.get_figheight() * 72
    points = []
    for axes, x, y, text in canvas.marks:
        across, up = axes.transData.transform((x, y))
        if math.isfinite(across) and math.isfinite(up):
            points.append((round(float(across), 1), round(height - float(up), 1), text))
    return Chart(key, title, summary, drawn, points, table, note)


class Look:
    """How series look: a framework has the same colour and mark in every chart, a rival a dash of its own."""

    def __init__(self, frameworks: list[str], rivals: list[str]) -> None:
        self._index = {name: place for place, name in enumerate(frameworks)}
        self._parts = {label(name, rival): (name, rival) for name in frameworks for rival in (None, *rivals)}
        self._dashes = dict(zip([None, *rivals], _DASHES * (1 + len(rivals)), strict=False))

    def colour(self, framework: str) -> str:
        """The colour that stands for a framework."""
        return svg.series(self._index.get(framework, len(self._index)))

    def mark(self, framework: str) -> str:
        """Its mark."""
        return _MARKERS[self._index.get(framework, len(self._index)) % len(_MARKERS)]

    def named(self, name: str, **more: Any) -> dict[str, Any]:
        """As `line`, for a name made by `label`."""
        return self.line(*self._parts.get(name, (name, None)), **more)

    def line(self, framework: str, rival: str | None = None, **more: Any) -> dict[str, Any]:
        """Arguments of `plot` for a line with marks."""
        colours = {"color": self.colour(framework), "mec": svg.SURFACE}
        shape = {"marker": self.mark(framework), "ls": self._dashes.get(rival, "-"), "ms": 6.5, "lw": 1.8}
        return {**colours, **shape, **more}


def legend(canvas: Canvas, axes: Axes) -> None:
    """Name the series above the drawing, where there is more than one; the figure grows by it."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = 4 if sum(map(len, labels)) < 34 and len(labels) <= 4 else 2
        canvas.figure.set_figheight(canvas.figure.get_figheight() + 17 / 72 * (math.ceil(len(labels) / columns) - 1))
        canvas.figure.legend(
            handles, labels, loc="outside upper left", ncols=columns, handlelength=1.8, columnspacing=1.2
        )


def whole_numbers(axes: Axes) -> None:
    """Ticks of the x axis at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def ranks(np: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{np} rank{'' if np == 1 else 's'}"


def brief(text: str) -> str:
    """A name that fits beside a chart, without what does not print."""
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
