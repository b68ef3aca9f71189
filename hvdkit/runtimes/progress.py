"""The progress of a build: bars on a terminal, elsewhere a line for each stage."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from hvdkit.progress import ProgressDisplay

# The stages of a build in order, and the seconds that each takes on one core: x86-64 at about 2.5 GHz, gcc 12,
# November 2026. Only their proportions matter.
CREATE, INSTALL, COMPILE, PROVE = "create", "install", "compile", "prove"
COSTS: dict[str, dict[str, float]] = {
    "mxnet": {CREATE: 4, INSTALL: 24, COMPILE: 60, PROVE: 9},
    "pytorch": {CREATE: 4, INSTALL: 38, COMPILE: 90, PROVE: 12},
    "tensorflow": {CREATE: 4, INSTALL: 45, COMPILE: 90, PROVE: 16},
    "deepspeed": {CREATE: 4, INSTALL: 52, COMPILE: 90, PROVE: 12},
    "horovod": {COMPILE: 90, PROVE: 16},  # a wheel for an environment that is there
}


class BuildProgress(ProgressDisplay):
    """Shows the stage of each runtime. Threads can share it."""

    def __init__(self, console: Console, names: list[str], clock: Callable[[], float] = time.monotonic) -> None:
        costs = {(name, stage): cost for name in names for stage, cost in COSTS[name].items()}
        super().__init__(costs, "all", console, clock=clock)
        self._stages: dict[str, str] = {}

    def waits(self, name: str, text: str) -> None:
        """The runtime waits for another process."""
        with self._lock:
            self.at_work[name] = f"{name}: {text}, still at it"
            self.show(name, text)
            self.say(f"{name}: {text}")

    def stage(self, name: str, stage: str, text: str) -> None:
        """The runtime enters a stage; the stages before it are done."""
        with self._lock:
            stages = list(COSTS[name])
            for before in stages[: stages.index(stage)]:
                self.done((name, before))
            self._stages[name] = stage
            self.waits(name, text)

    def advance(self, name: str, share: float) -> None:
        """The fraction `share` of the runtime's stage is done; shown on a terminal, and after a minute of silence."""
        with self._lock:
            self.done((name, self._stages[name]), share)
            text = self.at_work[name].rpartition(", ")[0]
            self.at_work[name] = f"{text}, {share:.0%}"
            self.show(name, text.removeprefix(f"{name}: "))

    def skip(self, name: str) -> None:
        """The runtime's stage needs no work, since its result is there already."""
        with self._lock:
            self.drop((name, self._stages[name]))

    def end(self, name: str, text: str, good: bool) -> None:
        """The runtime is ready, or has failed; the time of its remaining stages does not count any more."""
        with self._lock:
            last = self._stages.pop(name, None)
            if good and last:
                self.done((name, last))
            for stage in COSTS[name]:
                self.drop((name, stage))
            self.at_work.pop(name, None)
            self.show(name, f"[{'green' if good else 'red'}]{text}")
            self._bars.stop_task(self._rows[name])
            self.say(f"{name}: {text}")
