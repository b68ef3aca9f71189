"""Tables as data, from which HTML and Markdown are made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cell:
    """What a reader sees and, for figures, what a table is sorted by; `bad` stands out."""

    text: str
    value: float | None = None
    bad: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of cells below the names of their columns."""

    key: str
    columns: list[str]
    rows: list[list[Cell]]

    def figures(self) -> list[bool]:
        """Of each column whether it holds figures, which stand on the right; looks at each cell once."""
        found = [False] * len(self.columns)
        for row in self.rows:
            found = [known or cell.value is not None for known, cell in zip(found, row, strict=True)]
        return found


def number(value: float, digits: int = 0) -> Cell:
    """A figure with so many decimals."""
    return Cell(f"{value:,.{digits}f}", float(value))


def percent(fraction: float | None, digits: int = 1) -> Cell:
    """A fraction of 1, or what stands for none."""
    return Cell("–") if fraction is None else Cell(f"{100 * fraction:.{digits}f} %", fraction)
