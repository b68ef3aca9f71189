"""A chart of the page, and the figure that it is drawn on. matplotlib is loaded when the first one is drawn."""

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


@dataclass(frozen=True)
class Chart:
    """A drawn chart: `summary` describes it in words, `table` has its values.

    `points` are (x, y, text) in the coordinates of the SVG. The page shows the text when the pointer is near the point.
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
    points: list[tuple[Axes, float, float, str]] = field(default_factory=list)

    def point(self, axes: Axes, x: float, y: float, text: str) -> None:
        """Add a tooltip at (x, y), in the units of the axes."""
        self.points.append((axes, x, y, text))


def load() -> None:
    """Load matplotlib, before a second process is forked to draw some of the charts."""
    with drawing(1.0):  # imports matplotlib without the user's settings
        import matplotlib.backends.backend_svg  # noqa: F401


@contextmanager
def drawing(height: float) -> Iterator[Canvas]:
    """An empty figure, as wide as a chart and `height` points high, with the page's settings in force."""
    with plotting.settings(svg.SETTINGS):
        from matplotlib.figure import Figure

        yield Canvas(Figure(figsize=(WIDTH / 72, height / 72), layout="constrained"))


def finished(canvas: Canvas, key: str, title: str, summary: str, table: Table, note: str = "") -> Chart:
    """The chart, from the finished figure. Call it inside `drawing`, as the settings apply to writing too."""
    drawn = svg.inline(canvas.figure, f"{key}-")  # this fixes the layout
    height = canvas.figure.get_figheight() * 72
    points = []
    for axes, x, y, text in canvas.points:
        across, up = axes.transData.transform((x, y))
        if math.isfinite(across) and math.isfinite(up):
            points.append((round(float(across), 1), round(height - float(up), 1), text))
    return Chart(key, title, summary, drawn, points, table, note)


class Look:
    """The look of series: a framework has the same colour and marker in every chart, a rival its own dashes."""

    def __init__(self, frameworks: list[str], rivals: list[str]) -> None:
        self._index = {name: index for index, name in enumerate(frameworks)}
        self._parts = {label(name, rival): (name, rival) for name in frameworks for rival in (None, *rivals)}
        self._dashes = dict(zip([None, *rivals], _DASHES * (1 + len(rivals)), strict=False))

    def colour(self, framework: str) -> str:
        """The colour of a framework."""
        return svg.series(self._index.get(framework, len(self._index)))

    def marker(self, framework: str) -> str:
        """The marker of a framework."""
        return _MARKERS[self._index.get(framework, len(self._index)) % len(_MARKERS)]

    def line(self, name: str, **more: Any) -> dict[str, Any]:
        """Arguments of `plot` for a line with markers; `name` is the label of a framework with or without a rival."""
        framework, rival = self._parts.get(name, (name, None))
        colours = {"color": self.colour(framework), "mec": svg.SURFACE}
        shape = {"marker": self.marker(framework), "ls": self._dashes.get(rival, "-"), "ms": 6.5, "lw": 1.8}
        return {**colours, **shape, **more}


def legend(canvas: Canvas, axes: Axes) -> None:
    """Add a legend above the drawing if there is more than one series; the figure becomes higher."""
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 1:
        columns = 4 if sum(map(len, labels)) < 34 and len(labels) <= 4 else 2
        canvas.figure.set_figheight(canvas.figure.get_figheight() + 17 / 72 * (math.ceil(len(labels) / columns) - 1))
        canvas.figure.legend(
            handles, labels, loc="outside upper left", ncols=columns, handlelength=1.8, columnspacing=1.2
        )


def label_rows(axes: Axes, labels: list[str]) -> None:
    """Label the rows of a horizontal chart, the first one at the top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="x")


def whole_numbers(axes: Axes) -> None:
    """Put the ticks of the x axis at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def ranks(np: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{np} rank{'' if np == 1 else 's'}"


def brief(text: str, longest: int = 28) -> str:
    """A name shortened to fit in a drawing, with a replacement for characters that do not print."""
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return text if len(text) <= longest else text[: max(1, longest - 1)] + "…"
