"""The memory that a recipe needs, as tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hvdkit.report.tabular import Cell, Table, number
from hvdkit.results.memory import MemoryNeed, MemoryRow, Parts


def title(need: MemoryNeed) -> str:
    """What the tables are of."""
    how = f"{need.precision}{', recompute' if need.recompute else ''}, batch {need.batch_size}"
    room = "" if need.device_bytes is None else f"; {need.device} has {need.device_bytes / 2**20:,.0f} MiB"
    if need.device_bytes and need.room_bytes and need.room_bytes < need.device_bytes:
        room += f", {need.room_bytes / 2**20:,.0f} to fill"
    return f"{need.recipe}: {need.model}, {need.parameters:,} parameters, {how}; MiB of a rank{room}"


def tables(need: MemoryNeed) -> Iterator[Table]:
    """One for each number of ranks: a row for each part that is not empty, a column for each stage of sharding, or of
    a model that is divided over ranks.
    """
    for ranks in dict.fromkeys(row.ranks for row in need.rows):
        mine = [row for row in need.rows if row.ranks == ranks]
        lines = [[Cell(name), *(cell_of(row) for row in mine)] for name, cell_of in _lines(need, mine).items()]
        heading, columns = f"{ranks} ranks, sharding:", [str(row.stage) for row in mine]
        if ranks == 1:
            heading, columns = "1 rank", [""]
        elif mine[0].held_by:
            heading, columns = f"{ranks} ranks, stage:", [f"{at}: {_listed(row)}" for at, row in enumerate(mine)]
        yield Table("memory", [heading, *columns], lines)


def notes(need: MemoryNeed) -> list[str]:
    """What stands below the tables."""
    missing = dict.fromkeys(
        "parallel" if row.held_by else f"sharding: {row.stage}" for row in need.rows if not row.supported
    )
    return [
        *need.notes,
        *(f"{what} is counted only: training under {need.framework} refuses it" for what in missing),
        f"framework: {need.framework}'s own memory, {need.framework_source}; scratch space of kernels is not counted",
    ]


def _listed(row: MemoryRow) -> str:
    """Its ranks, which follow each other."""
    first, *more = row.held_by or [0]
    return f"ranks {first}–{more[-1]}" if more else f"rank {first}"


def _lines(need: MemoryNeed, rows: list[MemoryRow]) -> dict[str, Callable[[MemoryRow], Cell]]:
    """The rows of a table by their names."""

    def part(name: str) -> Callable[[MemoryRow], Cell]:
        return lambda row: _mib(getattr(row.parts, name))

    lines = {name: part(name) for name in Parts.model_fields if any(getattr(row.parts, name) for row in rows)}
    lines["total"] = lambda row: _mib(row.total_bytes)
    if rows[0].ranks > 1 and not rows[0].held_by:
        lines["sent in a step"] = lambda row: _mib(row.sent_bytes_per_step)
    if need.device_bytes is not None:
        lines["fits"] = lambda row: Cell("yes" if row.fits else "no", bad=not row.fits)
        lines["largest batch_size"] = lambda row: number(row.largest_batch)
    return lines


def _mib(count: int | None) -> Cell:
    return number(None) if not count else number(count / 2**20, 0 if count >= 100 * 2**20 else 1)
