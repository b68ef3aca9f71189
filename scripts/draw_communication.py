"""Draws two pictures of docs/images/: communication.png, a ring over sockets, the memory of one host, and lanes between
hosts; allreduce.png, what crosses between two hosts with a ring, a hierarchy and a central server.

.venv/bin/python -m scripts.draw_communication
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
Point = tuple[float, float]
PLACES: tuple[Point, ...] = ((-0.9, 0.5), (-0.9, -0.5), (0.9, 0.5), (0.9, -0.5))
# By the recipe's word: title, what it costs, and arrows from rank to rank, of which some go both ways.
WAYS: dict[str, tuple[str, str, tuple[tuple[int, int, bool], ...]]] = {
    "ring": (
        "ring", "1.5 vectors cross each way",
        ((1, 0, False), (0, 2, False), (2, 3, False), (3, 1, False)),
    ),
    "hierarchical": (
        "hierarchical", "1 vector crosses each way",
        ((0, 1, True), (2, 3, True), (0, 2, True)),
    ),
    "central": (
        "central", "2 vectors cross, and all wait for rank 0",
        ((0, 1, True), (0, 2, True), (0, 3, True)),
    ),
}  # fmt: skip


def main() -> None:
    """Draw both pictures, three panels each."""
    draw("communication.png", ring, memory, lanes)
    draw("allreduce.png", *(partial(way, name) for name in WAYS))


def draw(name: str, *panels: Callable[[Axes], None]) -> None:
    """One picture."""
    figure = Figure(figsize=(9.6, 3.3), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels)), panels, strict=True):
        axes.set(xlim=(-1.55, 1.55), ylim=(-1.45, 1.3), aspect="equal")
        axes.axis("off")
        panel(axes)
    figure.savefig(IMAGES / name, dpi=110)


def ring(axes: Axes) -> None:
    """Four ranks, each of which sends chunks to the next one."""
    places = [(0.85 * math.sin(turn * math.pi / 2), 0.15 + 0.8 * math.cos(turn * math.pi / 2)) for turn in range(4)]
    for number, place in enumerate(places):
        arrow(axes, place, places[(number + 1) % 4], "#777777", bend=-0.25, short=17)
    for number, place in enumerate(places):
        rank(axes, place, number)
    caption(axes, "A ring over sockets", "2 (n − 1) times a rank hands 1/n of the tensor to the next")


def memory(axes: Axes) -> None:
    """Two ranks and the slots that they share."""
    axes.add_patch(FancyBboxPatch((-0.62, -0.72), 1.24, 1.44, boxstyle="round,pad=0.06", fc="#f4f4f4", ec="#999999"))
    axes.text(0, 0.86, "shared memory", ha="center", va="center", fontsize=9, color="#555555")
    for number, side in enumerate((-1, 1)):
        rank(axes, (1.25 * side, 0), number)
        for row, (text, at) in enumerate((("input", 0.36), ("sum", -0.36))):
            corner = (0.32 * side - 0.25, at - 0.2)
            axes.add_patch(Rectangle(corner, 0.5, 0.4, fc=COLOURS[number], alpha=0.85 if row else 0.4, ec="none"))
            axes.text(0.32 * side, at, f"{text}\nof {number}", ha="center", va="center", fontsize=8)
            arrow(axes, (1.1 * side, 0.12 if row == 0 else -0.12), (0.6 * side, at), COLOURS[number])
            other = COLOURS[1 - number]
            up = 1 - 2 * row
            arrow(axes, (-0.12 * side, at + 0.22 * up), (1.12 * side, 0.3 * up), other, -0.32 * side * up, dashed=True)
    caption(axes, "One host: memory", "solid: a rank writes. Dashed: it reads what the other has")


def lanes(axes: Axes) -> None:
    """Two hosts of two ranks, and what crosses between them."""
    hosts(axes)
    for x in (-0.9, 0.9):
        arrow(axes, (x - 0.1, 0.3), (x - 0.1, -0.3), "#777777", both=True)
        axes.text(x - 0.05, 0, "memory", ha="left", va="center", fontsize=8, color="#555555")
    for lane, y in enumerate((0.5, -0.5)):
        arrow(axes, (-0.65, y), (0.65, y), COLOURS[lane], both=True)
        text = f"part {lane} of 2"
        axes.text(0, y + 0.14, text, ha="center", va="center", fontsize=8, color=COLOURS[lane])
        for host, x in enumerate((-0.9, 0.9)):
            rank(axes, (x, y), 2 * host + lane, COLOURS[lane])
    caption(axes, "Several hosts: lanes", "each part is summed in memory, then in a ring over sockets")


def way(name: str, axes: Axes) -> None:
    """Two hosts of two ranks, and who sends to whom."""
    title, text, arrows = WAYS[name]
    hosts(axes)
    for start, end, both in arrows:
        crosses = start // 2 != end // 2
        colour = COLOURS[0] if crosses else "#777777"
        arrow(axes, PLACES[start], PLACES[end], colour, both=both, short=14)
    for number, place in enumerate(PLACES):
        rank(axes, place, number, "#444444")
    caption(axes, title, text)


def hosts(axes: Axes) -> None:
    """A box for each of two hosts."""
    for host, x in enumerate((-0.9, 0.9)):
        box = {"boxstyle": "round,pad=0.06", "fc": "#f4f4f4", "ec": "#999999"}
        axes.add_patch(FancyBboxPatch((x - 0.42, -0.8), 0.84, 1.6, **box))
        axes.text(x, 1.0, f"host {host}", ha="center", va="center", fontsize=9, color="#555555")


def rank(axes: Axes, place: Point, number: int, colour: str | None = None) -> None:
    """A circle with the rank's number."""
    axes.scatter(*place, s=900, color=colour or COLOURS[number], zorder=3)
    axes.text(*place, f"rank\n{number}", ha="center", va="center", fontsize=8, color="white", zorder=4)


def arrow(
    axes: Axes,
    start: Point,
    end: Point,
    colour: str,
    bend: float = 0.0,
    both: bool = False,
    dashed: bool = False,
    short: float = 4,
) -> None:
    """An arrow from `start` to `end`, or both ways."""
    how = {"arrowstyle": "<|-|>" if both else "-|>", "connectionstyle": f"arc3,rad={bend}"}
    line = {"linestyle": "--" if dashed else "-", "linewidth": 1.6, "mutation_scale": 12}
    axes.add_patch(FancyArrowPatch(start, end, color=colour, shrinkA=14, shrinkB=short, **how, **line))


def caption(axes: Axes, title: str, text: str) -> None:
    """What a panel shows."""
    axes.set_title(title, fontsize=12)
    axes.text(0, -1.05, textwrap.fill(text, 34), ha="center", va="top", fontsize=10)


if __name__ == "__main__":
    main()
