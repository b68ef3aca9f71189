"""From one command to N ranks, and their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdkit.launch.job import Job

Tick = Callable[[], None]


def _direct(job: Job, on_tick: Tick | None = None) -> None:
    from hvdkit.launch.direct import run

    run(job, on_tick)


def _horovodrun(job: Job, on_tick: Tick | None = None) -> None:
    from hvdkit.launch.horovodrun import run

    run(job, on_tick)


# By the names of the command line's --launcher. Each is loaded at its first use, so that `hvdkit --help` stays quick.
LAUNCHERS: dict[str, Callable[..., None]] = {"direct": _direct, "horovodrun": _horovodrun}
