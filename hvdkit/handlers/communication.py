"""A run's own communication, watched: the bandwidth of its collectives, and a line when the links become slow."""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median
from typing import NamedTuple

import numpy as np

from hvdkit.core.group import Mesh
from hvdkit.core.loop import Handler, Loop
from hvdkit.core.seam import Adapter
from hvdkit.core.step_plan import due
from hvdkit.results.bus import sent_bytes

_SLOW, _BACK = 0.5, 0.75  # of what it was: below and above it is said
_WINDOW = 5  # lines one after the other: single ones are slow by chance
_KNOWN, _REMEMBERED = 5, 500  # lines before those from which it is known what it was; at most so many


def watched(adapter: Adapter, mesh: Mesh) -> BandwidthWatch | None:
    """What watches a run's communication; None for one rank, and unless the Horovod of all ranks counts. Collective."""
    if mesh.world.size == 1:
        return None
    counts = adapter.communication_counters() is not None
    return BandwidthWatch(adapter, mesh) if all(adapter.allgather_object(counts, mesh.world, name="counts")) else None


class BandwidthWatch(Handler):
    """Measures, from line to line of metrics.jsonl, the bandwidth of collectives of at least 64 KiB.

    `mbit_per_s` is the bus bandwidth since the line before, `epoch_mbit_per_s` that of the epoch so far; None where
    nothing was sent. It is the links' as soon as any collective uses them, else memory's. Time that a rank waits for
    another one within a collective counts as well, so of the ranks that do the same the fastest is meant, and of
    groups that average different parameters the slowest.
    """

    def __init__(self, adapter: Adapter, mesh: Mesh) -> None:
        self._adapter = adapter
        self._changes = Changes() if mesh.topology.size > mesh.topology.local_size else None
        self._line = self._epoch = self._carried()
        self._first = 0
        self._rates: list[float] = []
        self.mbit_per_s: float | None = None
        self.epoch_mbit_per_s: float | None = None
        self.notes: list[str] = []

    def on_epoch_begin(self, run: Loop) -> None:
        self._epoch, self._line, self._first = self._carried(), self._carried(), run.step + 1

    def on_step_end(self, run: Loop) -> None:
        self.mbit_per_s = None
        if due(run.recipe.log_every, run.step):
            self._read(run)

    def on_epoch_end(self, run: Loop) -> None:
        self._read(run)

    def figures(self) -> dict[str, float | list[str] | None]:
        """The median and the lowest of the lines' bandwidths, and what was said; for the result."""
        return {
            "communication_mbit_per_s": median(self._rates) if self._rates else None,
            "communication_mbit_per_s_lowest": min(self._rates, default=None),
            "communication_notes": self.notes or None,
        }

    def _carried(self) -> Reading:
        rows = [row for row in self._adapter.communication_counters() or [] if row.ranks > 1]
        linked = [row for row in rows if row.sharing < row.ranks]
        return Reading(
            bool(linked),
            sum(
                sent_bytes(row.collective, row.bytes, row.ranks, row.ranks // max(1, row.sharing))
                for row in linked or rows
            ),
            sum(row.seconds for row in linked or rows),
        )

    def _read(self, run: Loop) -> None:
        """Find the bandwidth since the line before, the same on all ranks; collective."""
        now = self._carried()
        own = [run.mesh.data.root, _rate(self._line, now), _rate(self._epoch, now), time.time()]
        gathered = self._adapter.allgather(self._adapter.from_numpy(np.array([own])), run.mesh.world, "communication")
        everyone = self._adapter.to_numpy(gathered)
        self.mbit_per_s, self.epoch_mbit_per_s = (_of_all(everyone[:, 0], everyone[:, column]) for column in (1, 2))
        if self.mbit_per_s is not None:
            self._rates.append(self.mbit_per_s)
            sample = Sample(self._first, float(everyone[0, 3]), self.mbit_per_s)
            said = self._changes.after(sample) if self._changes else None
            if said:
                self.notes.append(said)
                run.warn([said])
        self._line, self._first = now, run.step + 1


class Reading(NamedTuple):
    """What has been sent since the process started, by links if any was, else in memory: bytes in the sense of bus
    bandwidth, and the seconds that they took."""

    by_links: bool
    bytes: float
    seconds: float


def _rate(before: Reading, now: Reading) -> float:
    """Mbit/s between two readings; not a number if nothing was sent."""
    seconds = now.seconds - before.seconds
    comparable = before.by_links == now.by_links and seconds > 0
    return 8e-6 * (now.bytes - before.bytes) / seconds if comparable else math.nan


def _of_all(groups: np.ndarray, rates: np.ndarray) -> float | None:
    """The lowest of the groups' bandwidths, of which each is its fastest rank's; None if nothing was sent."""
    best = [rates[groups == group] for group in np.unique(groups)]
    known = [float(np.nanmax(of_group)) for of_group in best if not np.isnan(of_group).all()]
    return min(known, default=None)


class Sample(NamedTuple):
    """The bandwidth of a line of metrics.jsonl, which begins with update `step` and ends at `at` (`time.time`)."""

    step: int
    at: float
    mbit_per_s: float


class Changes:
    """Finds out when links carry less than a half of what they did, and when they are back.

    They do if each of the last 5 lines is below a half of the median of up to 500 lines before, without those of slow
    times. They are back if the median of 5 lines is above three quarters of it.
    """

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=_REMEMBERED)
        self._recent: deque[Sample] = deque(maxlen=_WINDOW)
        self._slow: float | None = None  # what they carry instead

    def after(self, sample: Sample) -> str | None:
        """What there is to say after another line of the run."""
        if self._slow is None and len(self._recent) == _WINDOW:
            self._usual.append(self._recent[0].mbit_per_s)
        self._recent.append(sample)
        if len(self._usual) < _KNOWN:
            return None
        usual, now = median(self._usual), median(line.mbit_per_s for line in self._recent)
        if self._slow is None and all(line.mbit_per_s < _SLOW * usual for line in self._recent):
            self._slow, since = now, self._recent[0]
            return (
                f"links: the bandwidth of collectives has fallen from {usual:.3g} to {now:.3g} Mbit/s {_since(since)}; "
                "hvdkit bench links shows which link it is"
            )
        if self._slow is not None and now > _BACK * usual:
            since = next(line for line in self._recent if line.mbit_per_s > _BACK * usual)
            said = f"links: the bandwidth of collectives is back at {now:.3g} Mbit/s {_since(since)}"
            said, self._slow = f"{said}, after {self._slow:.3g} of {usual:.3g}", None
            return said
        return None


def _since(sample: Sample) -> str:
    return f"since step {sample.step} ({time.strftime('%H:%M:%S', time.localtime(sample.at))})"
