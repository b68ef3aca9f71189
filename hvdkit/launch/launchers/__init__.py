"""The launchers, by the names of the command line's --launcher: modules of this package with a function `run`."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdkit.launch.job import Job, Tick


def _launcher(name: str) -> Callable[..., None]:
    """The launcher of that name, loaded at its first use so that `hvdkit --help` stays quick."""

    def run(job: Job, on_tick: Tick | None = None) -> None:
        import_module(f"{__name__}.{name}").run(job, on_tick)

    return run


LAUNCHERS = {name: _launcher(name) for name in ("direct", "horovodrun")}
