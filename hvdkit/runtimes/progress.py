"""The progress of a build and the time left: bars on a terminal, elsewhere a line for each stage."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from rich.console import Console

from hvdkit.bars import Bars
from hvdkit.time_left import TimeLeft

# The stages of a build in order, and the seconds that each takes on one core: x86-64 at about 2.5 GHz, gcc 12,
# November 2026. After the first minute only their proportions matter.
CREATE, INSTALL, COMPILE, PROVE = "create", "install", "compile", "prove"
COSTS: dict[str, dict[str, float]] = {
    "mxnet": {CREATE: 4, INSTALL: 24, COMPILE: 60, PROVE: 9},
    "pytorch": {CREATE: 4, INSTALL: 38, COMPILE: 90, PROVE: 12},
    "tensorflow": {CREATE: 4, INSTALL: 45, COMPILE: 90, PROVE: 16},
    "deepspeed": {CREATE: 4, INSTALL: 52, COMPILE: 90, PROVE: 12},
    "horovod": {COMPILE: 90, PROVE: 16},  # a wheel for an environment that is there
}
_USEFUL_CORES = 3  # more cores make a build of three runtimes hardly faster


class BuildProgress(Bars):
    """Shows the stage of each runtime. Threads can share it."""

    def __init__(self, console: Console, names: list[str], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, clock=clock)
        self._stages: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        cores = min(len(os.sched_getaffinity(0)), _USEFUL_CORES)
        costs = {(name, stage): cost for name in names for stage, cost in COSTS[name].items()}
        self._left = TimeLeft(costs, usual_s=sum(costs.values()) / cores, clock=clock)
        self._runtimes = {name: self._add(name, "waiting", start=False) for name in names}
        self._all = self._add("all", self._left.text())

    def waits(self, name: str, text: str) -> None:
        """The runtime waits for another process."""
        with self._lock:
            self._stage(name, text)

    def stage(self, name: str, stage: str, text: str) -> None:
        """The runtime enters a stage; the stages before it are done."""
        with self._lock:
            stages = list(COSTS[name])
            for before in stages[: stages.index(stage)]:
                self._left.done((name, before))
            self._stages[name] = stage
            self._left.begin((name, stage))
            self._stage(name, text)

    def advance(self, name: str, share: float) -> None:
        """The fraction `share` of the runtime's stage is done; shown on a terminal only."""
        with self._lock:
            self._left.done((name, self._stages[name]), share)
            self._update(name)

    def skip(self, name: str) -> None:
        """The runtime's stage needs no work, since its result is there already."""
        with self._lock:
            self._left.drop((name, self._stages[name]))

    def end(self, name: str, text: str, good: bool) -> None:
        """The runtime is ready, or has failed, and its remaining stages are dropped."""
        with self._lock:
            stages, last = list(COSTS[name]), self._stages.pop(name, None)
            self._texts.pop(name, None)
            done = stages.index(last) + good if last else 0
            for stage in stages[:done]:
                self._left.done((name, stage))
            for stage in stages[done:]:
                self._left.drop((name, stage))
            style = "green" if good else "red"
            self._say(name, text, f"[{style}]{text}")
            if good:  # else its bar stays where it was
                self._update(name)
            self._update_all()
            self._bars.stop_task(self._runtimes[name])

    def _at_work(self) -> tuple[str, str]:
        lines = []
        for name, text in self._texts.items():
            share = self._left.share((name, self._stages.get(name)).__eq__)
            lines.append(f"{name}: {text}{f', {share:.0%}' if 0 < share < 1 else ', still at it'}")
        return "; ".join(lines), self._left.text()

    def _stage(self, name: str, text: str) -> None:
        self._texts[name] = text
        self._say(name, text, text)
        self._update(name)

    def _say(self, name: str, text: str, styled: str) -> None:
        self._show(self._runtimes[name], text=styled)
        if not self._console.is_terminal:
            self._print(f"{name}: {text}", self._left.text())

    def _update(self, name: str) -> None:
        self._show(self._runtimes[name], self._left.share(lambda step: step[0] == name))
        self._update_all()

    def _update_all(self) -> None:
        share = self._left.share()
        self._show(self._all, share, text=self._left.text())
        if share >= 1:
            self._bars.stop_task(self._all)
