"""matplotlib figures as inline SVG: with real text, unique ids, and the colours of the page's style sheet.

matplotlib writes colours as numbers. Figures are drawn in placeholder colours, which become CSS variables here, so that
the same drawing works in light and dark.
"""

from __future__ import annotations

import html
import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, MUTED, GRID, SURFACE, BAD = "#010101", "#020202", "#030303", "#040404", "#050505"
SERIES = 8  # colours for series; after that they repeat
_VARIABLES = {INK: "ink", MUTED: "muted", GRID: "grid", SURFACE: "surface", BAD: "bad"}
SETTINGS = {
    "svg.fonttype": "none",  # real text, which browsers find, scale and read out
    "svg.hashsalt": "hvdkit",  # the same data gives the same page
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


def series(index: int) -> str:
    """The placeholder colour of a series."""
    return f"#1000{index % SERIES:02x}"


def inline(figure: Figure, prefix: str) -> str:
    """The figure as an `<svg>` element whose ids begin with `prefix`."""
    written = io.BytesIO()
    _draw(figure, written)
    text = written.getvalue().decode()
    text = re.sub(r"<(metadata|style)\b.*?</\1>", "", text[text.index("<svg") :], flags=re.DOTALL)
    return re.sub(r"<\w[^>]*>", lambda tag: _tag(tag[0], prefix), text)


def _tag(tag: str, prefix: str) -> str:
    if tag.startswith("<svg"):
        tag = re.sub(r' (width|height|version)="[^"]*"', "", tag)
        tag = tag.replace("<svg", '<svg aria-hidden="true"')  # the element around it has the label
    tag = re.sub(r'(\sid="|href="#|\burl\(#)', rf"\g<1>{prefix}", tag)
    return re.sub(r'(?<=\sstyle=")[^"]*', lambda style: _style(html.unescape(style[0])), tag)


def _draw(figure: Figure, file: io.BytesIO) -> None:
    """Lay out and write the figure, once each.

    `savefig` draws a figure with a layout engine twice, which would take a fifth of a report's time.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
        patch.set(facecolor="none", edgecolor="none")
    canvas = FigureCanvasSVG(figure)  # the layout measures text with it
    if engine := figure.get_layout_engine():
        engine.execute(figure)
        figure.set_layout_engine("none")
    canvas.print_svg(file)


def _style(text: str) -> str:
    text = re.sub(r"font:\s*((?:bold|\d{3})\s+)?([\d.]+px)[^;]*", _font, text)
    text = re.sub(r"font-family:[^;]*;?", "", text)
    text = re.sub(r"#1000([0-9a-f]{2})", lambda match: f"var(--series-{int(match[1], 16)})", text)
    return re.sub("|".join(_VARIABLES), lambda match: f"var(--{_VARIABLES[match[0]]})", text)


def _font(match: re.Match[str]) -> str:
    weight = f"font-weight: {match[1].strip()}; " if match[1] else ""
    return f"{weight}font-size: {match[2]}"
