"""The base class of all observers; see `hvdkit.core.seam.Observer`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hvdkit.results.recording import Kind


class Observer:
    """For a framework that records trace events without preparation. `hvd` is its Horovod, or None."""

    def __init__(self, hvd: Any = None) -> None:
        self._hvd, self._writes = hvd, False

    def watch(self, kind: Kind) -> None:
        """Called before steps of another kind. Does nothing here."""

    def timeline(self, path: Path | None) -> None:
        """Start Horovod's timeline at `path`; None stops it, after which the file is complete."""
        if self._hvd is not None and self._writes:
            self._hvd.stop_timeline()
        self._writes = path is not None
        if self._hvd is not None and path is not None:
            self._hvd.start_timeline(str(path))

    def own_profile(self, path: Path | None) -> None:
        """Does nothing: the framework has no profiler that is used."""

    def device(self) -> tuple[str, float | None]:
        """The processor's name, and None, as its memory is the machine's."""
        from hvdkit.results.machine import this_machine  # training does not need it

        return this_machine().processor, None
