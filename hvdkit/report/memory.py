"""The memory that a recipe needs, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hvdkit.report.tabular import Cell, Table, number
from hvdkit.results.memory import MemoryNeed, MemoryRow, Parts


def title(found: MemoryNeed) -> str:
    """What the tables are of."""
    how = f"{found.precision}{', recompute' if found.recompute else ''}, batch {found.batch_size}"
    room = "" if found.device_bytes is None else f"; {found.device} has {found.device_bytes / 2**20:,.0f} MiB"
    return f"{found.recipe}: {found.model}, {found.parameters:,} parameters, {how}; MiB of a rank{room}"


def tables(found: MemoryNeed) -> Iterator[Table]:
    """One for each number of ranks: a row for each part that is not empty, a column for each stage of sharding."""
    for ranks in dict.fromkeys(row.ranks for row in found.rows):
        mine = [row for row in found.rows if row.ranks == ranks]
        lines = [[Cell(name), *(made(row) for row in mine)] for name, made in _lines(found, mine).items()]
        heading = "1 rank" if ranks == 1 else f"{ranks} ranks, sharding:"
        yield Table("memory", [heading, *(row.stage if ranks > 1 else "" for row in mine)], lines)


def notes(found: MemoryNeed) -> list[str]:
    """What stands below the tables."""
    missing = dict.fromkeys(row.stage for row in found.rows if not row.supported)
    return [
        *found.notes,
        *(f"sharding: {stage} is counted only: training under {found.framework} refuses it" for stage in missing),
        f"framework: {found.framework}'s own memory, {found.framework_source}; scratch space of kernels is not counted",
    ]


def _lines(found: MemoryNeed, rows: list[MemoryRow]) -> dict[str, Callable[[MemoryRow], Cell]]:
    """The rows of a table by their names."""

    def part(name: str) -> Callable[[MemoryRow], Cell]:
        return lambda row: _mib(getattr(row.parts, name))

    lines = {name: part(name) for name in Parts.model_fields if any(getattr(row.parts, name) for row in rows)}
    lines["total"] = lambda row: _mib(row.total_bytes)
    if rows[0].ranks > 1:
        lines["sent in a step"] = lambda row: _mib(row.sent_bytes_per_step)
    if found.device_bytes is not None:
        lines["fits"] = lambda row: Cell("yes" if row.fits else "no", bad=not row.fits)
        lines["largest batch_size"] = lambda row: number(row.largest_batch)
    return lines


def _mib(count: int | None) -> Cell:
    return number(None) if not count else number(count / 2**20, 0 if count >= 100 * 2**20 else 1)
