"""Draws docs/images/mesh.png of docs/parallelism.md, as `hvdkit report` draws the ranks of a run.

.venv/bin/python -m scripts.draw_parallelism
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from hvdkit import tasks
from hvdkit.recipe import registry, schema
from hvdkit.report import mesh
from hvdkit.worker import stages

MESH = Path(__file__).resolve().parent.parent / "docs" / "images" / "mesh.png"
COLOURS = {
    "pipeline": "#0072b2", "ends": "#0072b2", "data": "#00875f", "tensor": "#d55e00",
    "ink": "#16191d", "muted": "#59626d", "ground": "#ffffff",
}  # fmt: skip


def main() -> None:
    """Draw it: eight ranks on two hosts."""
    keys = ["parallel.pipeline=2", "parallel.tensor=2", "batch_size=8"]
    recipe = schema.load(registry.locate(Path("gpt-tiny")), keys)
    ranks = stages.planned(tasks.choose(recipe).architecture(), recipe.parallel, ["h1"] * 4 + ["h2"] * 4)
    figure = Figure(figsize=(8.2, 2.9), layout="constrained")
    mesh.draw(figure.subplots(), mesh.DrawnMesh.of(ranks, 2, shares_memory=True), COLOURS)
    figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=10)
    figure.savefig(MESH, dpi=110)


if __name__ == "__main__":
    main()
