"""The launchers, by the names of the command line's --launcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdkit.launch.job import Job, Tick


def _direct(job: Job, on_tick: Tick | None = None) -> None:
    from hvdkit.launch.launchers.direct import run

    run(job, on_tick)


def _horovodrun(job: Job, on_tick: Tick | None = None) -> None:
    from hvdkit.launch.launchers.horovodrun import run

    run(job, on_tick)


# Each is loaded at its first use, so that `hvdkit --help` stays quick.
LAUNCHERS: dict[str, Callable[..., None]] = {"direct": _direct, "horovodrun": _horovodrun}
