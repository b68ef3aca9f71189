"""A chart of the page: a Matplotlib figure as inline SVG, with real text, unique ids and the page's colours.

Matplotlib writes colours as numbers. Figures are drawn in placeholder colours, in place of which CSS variables are
written, so that the same drawing works in light and dark. Matplotlib is loaded when the first figure is drawn.
"""

from __future__ import annotations

import io
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hvdkit.report import plotting
from hvdkit.report.tabular import Table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 420.0  # points; on larger screens several stand side by side
INK, MUTED, GRID, SURFACE, BAD = "#010101", "#020202", "#030303", "#040404", "#050505"
_SERIES = [f"#1000{index:02x}" for index in range(8)]  # colours for series; after that they repeat
_VARIABLES = {
    **{INK: "ink", MUTED: "muted", GRID: "grid", SURFACE: "surface", BAD: "bad"},
    **{colour: f"series-{index}" for index, colour in enumerate(_SERIES)},
}
_METADATA = ("Creator", "Date", "Format", "Type")  # what Matplotlib would write, about itself
_SETTINGS = {
    "svg.fonttype": "none",  # real text, which browsers find, scale and read out
    "text.parse_math": False,  # a name with $ in it is a name
    "font.size": 12,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.labelsize": 11.5,
    "axes.titlesize": 12,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlecolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 11.5,
    "figure.dpi": 72,  # a pixel is a point, as in matplotlib's SVG
}


@dataclass(frozen=True)
class Chart:
    """A drawn chart: `summary` describes it in words, `table` has its values."""

    key: str
    title: str
    summary: str
    svg: str
    table: Table
    note: str = ""


@dataclass
class Canvas:
    """A figure that is being drawn, and the table of its values."""

    key: str
    title: str
    table: Table
    figure: Figure

    def legend(self, axes: Axes) -> None:
        """Add a legend above the drawing if there is more than one series; the figure becomes higher."""
        handles, labels = axes.get_legend_handles_labels()
        if len(handles) > 1:
            columns = 4 if sum(map(len, labels)) < 34 and len(labels) <= 4 else 2
            self.figure.set_figheight(self.figure.get_figheight() + 17 / 72 * (math.ceil(len(labels) / columns) - 1))
            shape = {"ncols": columns, "handlelength": 1.8, "columnspacing": 1.2}
            self.figure.legend(handles, labels, loc="outside upper left", **shape)

    def chart(self, summary: str, note: str = "") -> Chart:
        """The finished chart. Call it inside `drawing`, as the settings apply to writing too."""
        return Chart(self.key, self.title, summary, _inline(self.figure, self.key), self.table, note)


@contextmanager
def drawing(height: float, key: str = "", title: str = "", columns: list[str] | None = None) -> Iterator[Canvas]:
    """An empty figure, as wide as a chart and `height` points high, with the page's settings in force.

    `columns` are those of its table.
    """
    with plotting.settings(_SETTINGS | {"svg.hashsalt": key}):  # ids of shapes: the same data gives the same page
        from matplotlib.figure import Figure

        figure = Figure(figsize=(WIDTH / 72, height / 72), layout="constrained")
        yield Canvas(key, title, Table(key, columns or [], []), figure)


def series(index: int) -> str:
    """The placeholder colour of a series."""
    return _SERIES[index % len(_SERIES)]


def label_rows(axes: Axes, labels: list[str]) -> None:
    """Label the rows of a horizontal chart, the first one at the top."""
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.grid(axis="x")


def whole_numbers(axes: Axes) -> None:
    """Put the ticks of the x axis at whole numbers, and lines across."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")


def fit(axes: Axes, values: Iterable[float], least: float, most: float = math.inf) -> None:
    """Let the y axis of lines begin and end near the values, within 0 and `most`.

    It spans at least `least`, so that noise stays small.
    """
    known = [value for value in values if math.isfinite(value)] or [0.0]
    missing = max(0.0, least - (max(known) - min(known)))
    low, high = min(known) - missing / 2, max(known) + missing / 2
    margin = 0.06 * (high - low)
    axes.set_ylim(max(0.0, low - margin), min(most, high + margin))


def ranks(np: int) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{np} rank{'' if np == 1 else 's'}"


def brief(text: str, longest: int = 28) -> str:
    """A name shortened to fit in a drawing, with a replacement for characters that do not print."""
    text = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)
    return text if len(text) <= longest else text[: max(1, longest - 1)] + "…"


def _inline(figure: Figure, key: str) -> str:
    """The figure as an `<svg>` element whose ids begin with `key`."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)  # the layout measures text with it
    if engine := figure.get_layout_engine():
        engine.execute(figure)  # once; `savefig` draws twice with a layout engine, a fifth of a report's time
        figure.set_layout_engine(None)
    for number, artist in enumerate(figure.findobj()):
        artist.set_gid(f"{key}-{number}")
    written = io.StringIO()
    figure.savefig(written, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    drawn = written.getvalue()
    for colour, name in _VARIABLES.items():
        drawn = drawn.replace(colour, f"var(--{name})")
    return drawn[drawn.index("<svg") :]
