"""What is removed or renamed under a running job: said when it happens, and made again where that is possible."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from hvdkit.errors import RunError
from hvdkit.files import write_atomic

_LOOK_S = 0.5


class Removals:
    """Looks after `folder`, in which a job runs. `then` is what comes of it where the whole folder goes.

    Of training, `config` is the text of its config.yaml, and `lost_metrics` says what happened to metrics.jsonl since
    its last call.
    """

    def __init__(
        self,
        folder: Path,
        say: Callable[[str], None],
        then: str,
        config: str | None = None,
        lost_metrics: Callable[[], str] = str,
    ) -> None:
        self._folder, self._say, self._then = folder, say, then
        self._config, self._lost_metrics = config, lost_metrics
        self._number = _number(folder)
        self._seen: set[str] = set()
        self._next = 0.0

    def look(self) -> None:
        """Say what has gone since the last look; looks at most every half second."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _LOOK_S
        with suppress(OSError, RunError):  # such as a full disk, which the ranks report
            self._look()

    def _look(self) -> None:
        number, lost_metrics = _number(self._folder), self._lost_metrics()
        if number != self._number:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._number = _number(self._folder)
            lost = "the checkpoints so far" if "checkpoints" in self._seen else "the logs so far"
            self._say(
                f"{self._folder}: removed or renamed while the run writes there; {self._then} written to a new folder "
                f"of that name; {lost} are not in it"
            )
            self._seen.clear()
        elif lost_metrics:
            self._say(f"{self._folder / 'metrics.jsonl'}: {lost_metrics}")
        for name, what in (
            ("logs", "the logs so far are gone"),
            ("config.yaml", "it is written again"),
            ("checkpoints", "the checkpoints so far are gone; the next one is written there"),
        ):
            path = self._folder / name
            there = os.path.lexists(path)
            if name in self._seen and not there:
                self._say(f"{path}: removed while the run writes there; {what}")
            self._seen = self._seen | {name} if there else self._seen - {name}
        (self._folder / "logs").mkdir(exist_ok=True)
        if self._config is not None and "config.yaml" not in self._seen:
            write_atomic(self._folder / "config.yaml", self._config)


def _number(path: Path) -> tuple[int, int] | None:
    """What identifies a folder; None if it is not there."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino
