"""Reads metrics.jsonl while a run writes it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from hvdkit.results.train import MetricLine

Watch = Callable[[MetricLine], None]


class MetricsTail:
    """Passes each new complete line of a growing metrics.jsonl to `watch`.

    Rank 0 replaces the file when it starts, with the lines of an earlier run that are still valid. A file that is there
    before is not read.
    """

    def __init__(self, path: Path, watch: Watch | None) -> None:
        self._path, self._watch, self._offset = path, watch, 0
        self._old = path.stat().st_ino if path.exists() else None
        self._now: int | None = None

    def poll(self) -> None:
        """Read what has come since the last call."""
        if self._watch is None or not self._path.exists():
            return
        with self._path.open("rb") as file:
            number = os.fstat(file.fileno()).st_ino
            if number == self._old:
                return
            if number != self._now:  # replaced again, by the first rank of an elastic run that goes on
                self._now, self._offset = number, 0
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # still being written
                self._offset += len(line)
                self._watch(MetricLine.model_validate_json(line))
