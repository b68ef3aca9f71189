"""What all observers share; see `hvdkit.core.seam.Observer`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdkit.results.machine import this_machine

if TYPE_CHECKING:
    from hvdkit.results.recording import Kind


class Observer:
    """Of a framework whose marks need nothing to be switched. `hvd` is its Horovod, where there is one."""

    def __init__(self, hvd: Any = None) -> None:
        self._hvd, self._writes = hvd, False

    def watch(self, kind: Kind) -> None:
        """The next steps are of that kind."""

    def timeline(self, path: Path | None) -> None:
        """Let Horovod write its timeline there from now on, or end it: then the file is whole."""
        if self._hvd is not None and self._writes:
            self._hvd.stop_timeline()
        self._writes = path is not None
        if self._hvd is not None and path is not None:
            self._hvd.start_timeline(str(path))

    def start_own_profile(self, folder: Path, rank: int) -> None:
        """The framework has none that is asked for."""

    def stop_own_profile(self) -> None:
        """As above."""

    def device_name(self) -> str:
        """What this rank computes on."""
        return this_machine().processor

    def device_peak_mib(self) -> float | None:
        """The most memory that the device has had in use; None where it is the machine's own."""
        return None
