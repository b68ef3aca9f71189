"""Tables as data, and the same as text for terminals and Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from rich.table import Table as RichTable

T = TypeVar("T")
Of = Callable[[T], "Cell | str"]  # makes the cell of an item


@dataclass(frozen=True)
class Cell:
    """The text of a cell and, for figures, the value that a table is sorted by; `bad` ones stand out."""

    text: str
    value: float | None = None
    bad: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells below the names of their columns."""

    key: str
    columns: list[str]
    rows: list[list[Cell]]

    @staticmethod
    def of(key: str, items: Iterable[T], columns: Mapping[str, Of[T]]) -> Table:
        """A row for each item; `columns` make its cells, by their headings."""
        cells = ([make(item) for make in columns.values()] for item in items)
        rows = [[Cell(cell) if isinstance(cell, str) else cell for cell in row] for row in cells]
        return Table(key, list(columns), rows)

    def without_empty(self, optional: Collection[str] | None = None) -> Table:
        """The table without those of the `optional` columns, by default all, that have a value in no row."""
        names = self.columns if optional is None else optional
        full = [any(row[column].text not in ("", "–") for row in self.rows) for column in range(len(self.columns))]
        kept = [full[column] or name not in names for column, name in enumerate(self.columns)]
        return Table(self.key, list(compress(self.columns, kept)), [list(compress(row, kept)) for row in self.rows])

    def figures(self) -> list[bool]:
        """Whether each column holds figures, which are right-aligned."""
        return [any(row[column].value is not None for row in self.rows) for column in range(len(self.columns))]


def number(value: float | None, digits: int = 0) -> Cell:
    """A figure with that many decimals; a dash for None."""
    return Cell("–") if value is None else Cell(f"{value:,.{digits}f}", float(value))


def percent(fraction: float | None, digits: int = 1) -> Cell:
    """A fraction of 1 in percent; a dash for None."""
    return Cell("–") if fraction is None else Cell(f"{100 * fraction:.{digits}f} %", fraction)


def bar(share: float, width: int = 5) -> str:
    """A share of 1 as a bar of at most `width` characters."""
    full = min(width, max(0, round(share * width)))
    return "█" * full + "·" * (width - full)


def times(value: float | None, factor: float) -> float | None:
    """The value in another unit; None stays None."""
    return None if value is None else factor * value


def size(count: float) -> str:
    """A number of bytes for people: in MiB from 0.1 MiB on, below in KiB or bytes."""
    if count >= 2**20 / 10:
        return f"{count / 2**20:,.1f} MiB"
    return f"{count / 1024:,.1f} KiB" if count >= 1024 else f"{count:,.0f} bytes"


def on_hosts(hosts: Iterable[str]) -> str:
    """How many ranks each host has, such as `2 on h1, 2 on h2`."""
    return ", ".join(f"{count} on {host}" for host, count in Counter(hosts).items())


def terminal(table: Table, title: str, wrap_from: int | None = None) -> RichTable:
    """The table for a terminal; bad cells are red. Columns from `wrap_from` on may wrap, by default none."""
    from rich import box  # a page needs no rich
    from rich.table import Table as RichTable
    from rich.text import Text

    rendered = RichTable(title=title, box=box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        fixed = wrap_from is None or index < wrap_from
        rendered.add_column(column, justify="right" if index and fixed else "left", no_wrap=fixed)
    for row in table.rows:
        rendered.add_row(*(Text(cell.text, "red" if cell.bad else "") for cell in row))
    return rendered


def markdown(table: Table) -> str:
    """The table in Markdown; bad cells are bold."""
    rows = [[f"**{cell.text}**" if cell.bad else cell.text for cell in row] for row in table.rows]
    lines = [f"| {' | '.join(cells)} |" for cells in (table.columns, *rows)]
    return "\n".join([lines[0], "|:---" + "|---:" * (len(table.columns) - 1) + "|", *lines[1:]])
