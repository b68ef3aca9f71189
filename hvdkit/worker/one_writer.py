"""The lock of a folder that a recipe's script writes without `hvdkit train`, whose launcher would hold it."""

from __future__ import annotations

from pathlib import Path

from hvdkit import replaced
from hvdkit.core.group import Mesh
from hvdkit.core.seam import Adapter
from hvdkit.errors import RequestError
from hvdkit.folder_lock import FolderLock
from hvdkit.paths import settled


class OneWriter:
    """Locks `folder` on rank 0 until `release`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock: FolderLock | None = None

    def check(self, adapter: Adapter, mesh: Mesh) -> None:
        """Take the lock, unless a rank of this run has it; collective.

        After a loss another rank may be rank 0 of an elastic run. Raises RequestError, the same on every rank, if
        another run is writing there.
        """
        refusal = ""
        if not any(adapter.allgather_object(self._lock is not None, mesh.world, name="locked")):
            if mesh.is_root:
                try:
                    if replaced.left(self._folder):
                        settled(self._folder)
                    self._lock = FolderLock(self._folder)
                except RequestError as error:
                    refusal = str(error)
            refusal = adapter.allgather_object(refusal, mesh.world, name="writer")[0]
        if refusal:
            raise RequestError(refusal)

    def release(self) -> None:
        """Remove the lock, if this rank has it."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
