"""Draws two pictures of docs/parallelism.md, docs/images/strategies.png and mesh.png.

.venv/bin/python -m scripts.draw_parallelism
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from hvdkit import tasks
from hvdkit.recipe import registry, schema
from hvdkit.report import mesh
from hvdkit.worker import stages

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
COLOURS = {
    "pipeline": "#0072b2", "ends": "#0072b2", "data": "#00875f", "tensor": "#d55e00",
    "ink": "#16191d", "muted": "#59626d", "ground": "#ffffff",
}  # fmt: skip
# A question, what to do where the answer is yes, and in what.
QUESTIONS = [
    ("Does a step fit on one rank?\nhvdkit memory RECIPE", "data parallel\n(the default)", "data"),
    ("With a smaller batch, recompute,\nbf16, accumulate?", "data parallel\nwith these keys", "data"),
    ("Do activations fit, and\nweights, gradients, slots do not?", "sharding:\noptimizer … parameters", "data"),
    (
        "Does a block fit on one rank,\nor are links between hosts slow?",
        "parallel.pipeline:\nstages of blocks",
        "pipeline",
    ),
    ("Do ranks of one host share memory,\nand do heads divide by them?", "parallel.tensor:\nparts of layers", "tensor"),
]


def main() -> None:
    """Draw both."""
    figure = Figure(figsize=(8.2, 5.55))
    axes = figure.add_axes((0, 0, 1, 1))
    strategies(axes)
    figure.savefig(IMAGES / "strategies.png", dpi=110)

    recipe = schema.load(
        registry.locate(Path("gpt-tiny")), ["parallel.pipeline=2", "parallel.tensor=2", "batch_size=8"]
    )
    hosts = ["h1"] * 4 + ["h2"] * 4
    ranks = stages.planned(tasks.choose(recipe).architecture(), recipe.parallel, hosts)
    figure = Figure(figsize=(8.2, 2.9), layout="constrained")
    axes = figure.subplots()
    mesh.draw(axes, mesh.DrawnMesh.of(ranks, 2, shares_memory=True), COLOURS)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=10)
    figure.savefig(IMAGES / "mesh.png", dpi=110)


def strategies(axes: Axes) -> None:
    """The questions from top to bottom, and a strategy beside each; the last line has both axes."""
    axes.set(xlim=(0, 8.2), ylim=(5.55, 0))
    axes.axis("off")
    for number, (question, strategy, kind) in enumerate(QUESTIONS):
        y = 0.5 + 0.92 * number
        _box(axes, 2.1, y, 3.6, question, COLOURS["muted"])
        _box(axes, 6.4, y, 2.6, strategy, COLOURS[kind])
        _arrow(axes, (3.9, y), (5.1, y), "yes")
        if number + 1 < len(QUESTIONS):
            _arrow(axes, (2.1, y + 0.31), (2.1, y + 0.61), "no")
    last = 0.5 + 0.92 * len(QUESTIONS)
    _arrow(axes, (2.1, last - 0.61), (2.1, last - 0.31), "neither alone is enough")
    _box(
        axes,
        4.0,
        last,
        7.4,
        "both: tensor within a host, pipeline between hosts, data with the ranks that are left",
        COLOURS["ink"],
    )


def _box(axes: Axes, x: float, y: float, width: float, text: str, colour: str) -> None:
    axes.add_patch(
        FancyBboxPatch((x - width / 2, y - 0.28), width, 0.56, boxstyle="round,pad=0.02", fc="white", ec=colour, lw=1.6)
    )
    axes.text(x, y, text, ha="center", va="center", fontsize=10, color=COLOURS["ink"])


def _arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str) -> None:
    axes.add_patch(
        FancyArrowPatch(start, end, arrowstyle="-|>", mutation_scale=11, color=COLOURS["muted"], shrinkA=2, shrinkB=2)
    )
    aside = (0.08, 0.0, "left") if start[0] == end[0] else (0.0, -0.13, "center")
    middle = (start[0] + end[0]) / 2 + aside[0], (start[1] + end[1]) / 2 + aside[1]
    axes.text(*middle, text, ha=aside[2], va="center", fontsize=9, color=COLOURS["muted"])


if __name__ == "__main__":
    main()
