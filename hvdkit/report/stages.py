"""The section of a run's page about its stages, where its model is divided over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from hvdkit.report import mesh
from hvdkit.report.collect import Run
from hvdkit.report.sections import Section
from hvdkit.report.tabular import Cell, Table, number
from hvdkit.results.train import TrainResult


def section(run: Run) -> Iterator[Section]:
    """A picture of the mesh, and a table with a row for each stage; nothing for a whole model."""
    result = run.result
    if result.stages:
        tensor = run.recipe.parallel.tensor if run.recipe else 1
        drawn = mesh.chart(mesh.DrawnMesh.of(result.stages, tensor, bool(result.shared_memory_ranks)))
        yield Section("stages", "Stages", list(_text(result)), list(drawn), [table(result)])


def table(result: TrainResult) -> Table:
    """A row for each stage."""
    stages = list(enumerate(result.stages or []))
    return Table.of(
        "stages",
        stages,
        {
            "stage": lambda row: Cell(str(row[0])),
            "ranks": lambda row: ", ".join(map(str, row[1].ranks)),
            "blocks": lambda row: mesh.blocks(row[1].blocks),
            "parameters": lambda row: number(row[1].parameters),
            "busy in a step, ms": lambda row: number(row[1].busy_ms, 1),
            "expected, ms": lambda row: number(row[1].passes_ms, 1),
            "state of a rank, MiB": lambda row: number(sum(row[1].state_bytes.values()) / 2**20, 1),
            "memory of its ranks, MiB": lambda row: ", ".join(f"{mib:,.0f}" for mib in row[1].peak_rss_mib),
        },
    ).without_empty()


def _text(result: TrainResult) -> Iterator[str]:
    """The bubble in words."""
    if result.bubble is not None:
        yield (
            f"Bubble: {100 * result.bubble:.0f} % of a step, in which a rank computes neither forward nor backward: it "
            "waits, averages, updates or reads. It is the mean over the stages. hvdkit profile draws a step."
        )
