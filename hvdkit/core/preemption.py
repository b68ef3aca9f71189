"""Ending in good order: has any rank been asked to stop? Looked for at steps that all ranks choose alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdkit.core import metrics
from hvdkit.core.topology import Topology

if TYPE_CHECKING:
    from hvdkit.core.seam import Adapter

LOOK_S = 5.0
_GROWTH = 8  # so many times as many steps at most from one look to the next: the first steps may be quick


class Stopping:
    """Looks after the next update, then about every LOOK_S seconds, after each update where these are longer.

    `step` is the number of updates that are finished, `asked` whether this rank has been asked.
    """

    def __init__(self, adapter: Adapter, topology: Topology, asked: Callable[[], bool], step: int) -> None:
        self._adapter, self._topology, self._asked = adapter, topology, asked
        self._last, self._next = step, step + 1

    def wanted(self, step: int, seconds: list[float]) -> bool:
        """Whether any rank has been asked by update `step`; collective where it looks, else False.

        `seconds` are of the updates up to this one, at least since the last look.
        """
        if step < self._next:
            return False
        steps = step - self._last
        # Whole microseconds add up exactly in whatever order, so that all ranks come to the same next step.
        taken_us = round(1e6 * sum(seconds[-steps:]))
        sums = metrics.reduce_sums(self._adapter, stop=float(self._asked()), taken_us=taken_us)
        fitting = int(1e6 * LOOK_S * steps * self._topology.size / max(1.0, sums["taken_us"]))
        self._last, self._next = step, step + max(1, min(fitting, _GROWTH * steps))
        return sums["stop"] > 0
