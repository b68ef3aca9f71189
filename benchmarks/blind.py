"""Predictions that were committed before the measured values were looked at: benchmarks/blind.csv.

They were written once and are not written anew. The measured values came into benchmarks/blind_measured.csv with a
later commit, from the files that the sets name.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from benchmarks.validation_row import Row

HERE = Path(__file__).parent
PREDICTED, MEASURED = HERE / "blind.csv", HERE / "blind_measured.csv"


def rows() -> Iterator[Row]:
    """The committed predictions for which a measured value was found."""
    with MEASURED.open(newline="") as file:
        lines = (line for line in file if not line.startswith("#"))
        measured = {(row["set"], row["row"]): float(row["measured"]) for row in csv.DictReader(lines)}
    with PREDICTED.open(newline="") as file:
        for row in csv.DictReader(file):
            value = measured.get((row["set"], row["row"]))
            if value is not None:
                middle, low, high = (float(row[key]) for key in ("predicted", "low", "high"))
                yield Row(f"blind: {row['set']}", row["row"], row["unit"], middle, value, "validation", low, high)
