"""Estimates the time left of work in known parts, from their relative costs and the time of the finished ones."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any


class TimeLeft:
    """The time left of work whose parts have relative costs.

    `usual_s` is how long all of it usually takes, None if that is unknown. It has the weight of `trust_s` seconds of
    measurement, which keeps the first estimates, after a few short parts, plausible.
    """

    def __init__(
        self,
        costs: Mapping[Any, float],
        usual_s: float | None = None,
        trust_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._costs: dict[Any, float] = dict(costs)
        self._done: dict[Any, float] = {}
        self._begun: dict[Any, float] = {}
        self._whole = sum(self._costs.values())
        self._usual_pace = usual_s / self._whole if usual_s and self._whole else None
        self._trust_s, self._clock = trust_s, clock
        self._began = clock()

    def begin(self, part: Any) -> None:
        """The part starts now. Until its progress is reported it counts as half done."""
        self._begun[part] = self._clock()

    def done(self, part: Any, share: float = 1.0) -> None:
        """Report the share of the part, 0 to 1, that is done."""
        self._done[part] = min(1.0, max(share, self._done.get(part, 0.0)))

    def drop(self, part: Any) -> None:
        """Remove what is left of the part: it exists already, or it failed."""
        cost = self._costs[part]
        self._costs[part] = cost * self._done.get(part, 0.0)
        self._whole -= cost - self._costs[part]
        self._done[part] = 1.0

    def share(self, of: Callable[[Any], bool] = lambda part: True) -> float:
        """The share of the parts selected by `of` that is done, 0 to 1."""
        whole: float = sum(cost for part, cost in self._costs.items() if of(part))
        done: float = sum(self._costs[part] * share for part, share in self._done.items() if of(part))
        return done / whole if whole else 1.0

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._began

    def seconds(self) -> float | None:
        """Seconds left; None while the duration of the parts is unknown."""
        done: float = sum(self._costs[part] * share for part, share in self._done.items())
        left: float = max(0.0, self._whole - done)
        if left <= 0:
            return 0.0
        if self._usual_pace is None:
            return left * self.elapsed_s() / done if done > 0 else None
        now = self._clock()
        done += sum(
            self._costs[part] / 2 for part, begun in self._begun.items() if begun < now and not self._done.get(part)
        )
        left = max(0.0, self._whole - done)
        trusted = self._trust_s / self._usual_pace
        return left * (self.elapsed_s() + self._trust_s) / (done + trusted)

    def text(self) -> str:
        """Such as `about 4 min left`; empty if that is unknown, or nothing is left."""
        return about(self.seconds())


def about(seconds: float | None) -> str:
    """A time left in words, rounded like an estimate."""
    if seconds is None or seconds < 1:
        return ""
    if seconds < 90:
        return f"about {10 * math.ceil(round(seconds) / 10)} s left"
    return f"about {round(seconds / 60)} min left"


def minutes(seconds: float) -> str:
    """A time such as ` 4:07`."""
    whole_s = int(seconds)
    return f"{whole_s // 60:2d}:{whole_s % 60:02d}"
