"""The memory that a recipe needs, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hvdkit.report.tabular import Cell, Table, number
from hvdkit.results.memory import MemoryNeed, MemoryRow, Parts


def title(need: MemoryNeed) -> str:
    """What the tables are of."""
    how = f"{need.precision}{', recompute' if need.recompute else ''}, batch {need.batch_size}"
    room = "" if need.device_bytes is None else f"; {need.device} has {need.device_bytes / 2**20:,.0f} MiB"
    return f"{need.recipe}: {need.model}, {need.parameters:,} parameters, {how}; MiB of a rank{room}"


def tables(need: MemoryNeed) -> Iterator[Table]:
    """One for each number of ranks: a row for each part that is not empty, a column for each stage of sharding."""
    for ranks in dict.fromkeys(row.ranks for row in need.rows):
        mine = [row for row in need.rows if row.ranks == ranks]
        lines = [[Cell(name), *(cell_of(row) for row in mine)] for name, cell_of in _lines(need, mine).items()]
        heading = "1 rank" if ranks == 1 else f"{ranks} ranks, sharding:"
        yield Table("memory", [heading, *(row.stage if ranks > 1 else "" for row in mine)], lines)


def notes(need: MemoryNeed) -> list[str]:
    """What stands below the tables."""
    missing = dict.fromkeys(row.stage for row in need.rows if not row.supported)
    return [
        *need.notes,
        *(f"sharding: {stage} is counted only: training under {need.framework} refuses it" for stage in missing),
        f"framework: {need.framework}'s own memory, {need.framework_source}; scratch space of kernels is not counted",
    ]


def _lines(need: MemoryNeed, rows: list[MemoryRow]) -> dict[str, Callable[[MemoryRow], Cell]]:
    """The rows of a table by their names."""

    def part(name: str) -> Callable[[MemoryRow], Cell]:
        return lambda row: _mib(getattr(row.parts, name))

    lines = {name: part(name) for name in Parts.model_fields if any(getattr(row.parts, name) for row in rows)}
    lines["total"] = lambda row: _mib(row.total_bytes)
    if rows[0].ranks > 1:
        lines["sent in a step"] = lambda row: _mib(row.sent_bytes_per_step)
    if need.device_bytes is not None:
        lines["fits"] = lambda row: Cell("yes" if row.fits else "no", bad=not row.fits)
        lines["largest batch_size"] = lambda row: number(row.largest_batch)
    return lines


def _mib(count: int | None) -> Cell:
    return number(None) if not count else number(count / 2**20, 0 if count >= 100 * 2**20 else 1)
