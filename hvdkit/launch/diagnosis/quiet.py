"""Whether ranks of a program without heartbeats hang, or work for long.

An agent reports a rank that has printed nothing, and neither read from nor written to a disk, for the stall timeout;
with it, whether its processes compute. One that does is at work as far as anybody can tell. So the job hangs where
- no rank makes progress, none computes, and there is evidence: a rank is frozen, or Horovod has named a collective that
  only some ranks have entered;
- no rank makes progress for ten times as long, and there is evidence, or each rank's main thread has not woken up once:
  one that waits for a GPU does.
What lasts is said before: which collective waits, and what the ranks do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hvdkit.launch.agent.watchdog import BUSY_FACTOR
from hvdkit.launch.diagnosis.stalls import Hang, Stall, open_collectives

_RECENT_S = 5.0


class Quiet:
    """Follows the quiet ranks of one job. A `timeout_s` of 0 waits for ever."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._say_after_s = timeout_s
        self.hang = False

    def look(
        self, hangs: Mapping[str, Hang], running: Mapping[str, tuple[int, str]], stalls: Iterable[Stall], now: float
    ) -> str | None:
        """Take in the ranks that are quiet at `now` of the launcher's clock, and who runs where; sets `hang`.

        Returns a line for the user where it lasts: at the timeout, and whenever the time has doubled since.
        """
        hangs = {name: hang.at(now) for name, hang in hangs.items() if name in running}
        if not hangs:
            self._say_after_s = self._timeout_s
            return None
        # Horovod repeats what waits. What it has said long ago may have come to its end.
        recent = max(min(hang.since for hang in hangs.values()), now - max(self._timeout_s / 2, _RECENT_S))
        waits = open_collectives(stalls, recent)
        evidence = bool(waits) or any(hang.frozen for hang in hangs.values())
        busy = any(hang.busy for hang in hangs.values())
        everyone = running.keys() <= hangs.keys()
        quiet_s = now - max(hang.since for hang in hangs.values())
        blocked = all(hang.blocked for hang in hangs.values())
        late = quiet_s > BUSY_FACTOR * self._timeout_s
        self.hang = everyone and ((evidence and not busy) or (late and (evidence or blocked)))
        if self.hang or quiet_s < self._say_after_s or not (waits or (everyone and not busy)):
            return None
        self._say_after_s = 2 * quiet_s
        entered = [hang.rank for hang in hangs.values() if hang.waiting]
        lines = [wait.text(entered, dict(running.values())) for wait in waits]
        lines += [f"rank {hang.rank} is {hang.state}" for hang in hangs.values() if not (waits and hang.waiting)]
        ends = everyone and (evidence or blocked)
        limit = f"ended after {BUSY_FACTOR * self._timeout_s:.0f} s" if ends else "not ended, as ranks may be at work"
        return f"{'; '.join(lines[:8])}; {limit} of this (--stall-timeout {self._timeout_s:g})"
