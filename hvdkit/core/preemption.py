"""Stopping in order: all ranks check, at the same steps, whether any rank was asked to stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdkit.core import metrics
from hvdkit.core.topology import Topology

if TYPE_CHECKING:
    from hvdkit.core.seam import Adapter

LOOK_S = 5.0
_GROWTH = 8  # the most by which the interval in steps grows between two checks: the first steps may be quick


class Stopping:
    """Checks after the next update and then about every LOOK_S seconds, or after each update if updates take longer.

    `step` is the number of finished updates; `asked()` says whether this rank was asked to stop.
    """

    def __init__(self, adapter: Adapter, topology: Topology, asked: Callable[[], bool], step: int) -> None:
        self._adapter, self._topology, self._asked = adapter, topology, asked
        self._last, self._next = step, step + 1

    def wanted(self, step: int, seconds: list[float]) -> bool:
        """Whether any rank was asked to stop; collective at the steps that check, False at the others.

        `seconds` holds the durations of the updates up to `step`, at least those since the last check.
        """
        if step < self._next:
            return False
        steps = step - self._last
        # Sums of whole microseconds are exact in any order, so all ranks compute the same next step.
        taken_us = round(1e6 * sum(seconds[-steps:]))
        sums = metrics.reduce_sums(self._adapter, stop=float(self._asked()), taken_us=taken_us)
        fitting = int(1e6 * LOOK_S * steps * self._topology.size / max(1.0, sums["taken_us"]))
        self._last, self._next = step, step + max(1, min(fitting, _GROWTH * steps))
        return sums["stop"] > 0
