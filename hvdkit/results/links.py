"""The schema of `links.json`: what the links between hosts carry, once or over time."""

from __future__ import annotations

import statistics
import time
from typing import Any

from pydantic import Field

from hvdkit.results.json_files import Figures, Result


class LinkRow(Figures):
    """One direction of a link, measured at `at_s` (seconds since 1970, UTC).

    `latency_us` is the median round trip of one byte. `mbit_per_s` is the median of windows of 0.1 s over one TCP
    connection, `low` and `high` are the least and the most of them. `rated_mbit_per_s` is --rated, or the speed of the
    sender's interface by its driver; None: unknown. Where there is a `fault`, nothing was measured.
    """

    at_s: float
    source: str
    target: str
    latency_us: float | None = None
    latency_p95_us: float | None = None
    mbit_per_s: float | None = None
    low_mbit_per_s: float | None = None
    high_mbit_per_s: float | None = None
    rated_mbit_per_s: float | None = None
    fault: str | None = None


class Links(Figures, Result, file="links.json"):
    """`links.json`: `rounds` rounds in the order of time, each of all pairs of hosts."""

    hvdkit_version: str
    hosts: list[str]
    seconds: float
    rounds: int = 0
    rows: list[LinkRow] = Field(default_factory=list)

    def records(self) -> list[dict[str, Any]]:
        """A row for each direction of a link and each round."""
        return [row.model_dump() for row in self.rows]

    def by_link(self) -> dict[tuple[str, str], list[LinkRow]]:
        """The rows of each link, by its two hosts."""
        links: dict[tuple[str, str], list[LinkRow]] = {}
        for row in self.rows:
            links.setdefault((row.source, row.target), []).append(row)
        return links

    def relative(self) -> list[tuple[LinkRow, float]]:
        """Each measured row with its rate as a share of the median of its link."""
        shares = []
        for rows in self.by_link().values():
            known = [(row, row.mbit_per_s) for row in rows if row.mbit_per_s]
            middle = statistics.median(rate for _, rate in known) if known else 1.0
            shares += [(row, rate / middle) for row, rate in known]
        return shares

    def by_hour(self) -> dict[int, float]:
        """The median share of the links' usual rate, by the hour of the day here."""
        hours: dict[int, list[float]] = {}
        for row, share in self.relative():
            hours.setdefault(time.localtime(row.at_s).tm_hour, []).append(share)
        return {hour: statistics.median(shares) for hour, shares in sorted(hours.items())}
