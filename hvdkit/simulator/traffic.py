"""What buckets of gradients take on the wire, for many what-ifs at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from hvdkit.simulator.lines import ZERO, Floats, Line


@dataclass(frozen=True)
class Lane:
    """One collective of each bucket: a line for each what-if, and the bytes by tensor, shape (tensors, what-ifs)."""

    lines: Sequence[Line]
    sizes: Floats

    @cached_property
    def _padded(self) -> tuple[Floats, Floats, Floats]:
        most = max(len(line.starts) for line in self.lines)
        starts = np.full((len(self.lines), most), np.inf)
        latency, slope = np.zeros((2, len(self.lines), most))
        for row, line in enumerate(self.lines):
            count = len(line.starts)
            starts[row, :count], latency[row, :count], slope[row, :count] = line.starts, line.latency, line.slope
        return starts, latency, slope

    @cached_property
    def _through(self) -> Floats:
        return np.concatenate([np.zeros((1, self.sizes.shape[1])), self.sizes.cumsum(axis=0)])

    def bytes_between(self, first: Any, last: Any) -> Floats:
        """Bytes of tensors `first` to `last`, each an index or one for each what-if (of any shape that ends so)."""
        cases = np.arange(self.sizes.shape[1])
        found: Floats = self._through[np.asarray(last) + 1, cases] - self._through[first, cases]
        return found

    def seconds(self, first: Any, last: Any) -> Floats:
        """How long those take; nothing where there are no bytes."""
        sizes = self.bytes_between(first, last)
        starts, latency, slope = self._padded
        cases = np.arange(sizes.shape[-1])
        index = np.zeros(sizes.shape, int)
        for column in range(1, starts.shape[1]):
            index += sizes >= starts[:, column]
        found = latency[cases, index] + slope[cases, index] * sizes
        return np.where(sizes > 0, found, 0.0)


def lane(lines: Sequence[Line | None], sizes: Sequence[Floats | None], tensors: int) -> Lane:
    """A lane of what-ifs of which some (None) have nothing to send in it."""
    empty = np.zeros(tensors)
    return Lane([line or ZERO for line in lines], np.stack([empty if s is None else s for s in sizes], axis=1))
