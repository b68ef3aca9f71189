"""A rank's folder for temporary files, and those that dead agents have left. Standard library only: see rank_agent.py.

An agent holds a lock on its folder as long as it lives. The kernel releases it: a folder without a lock is of an agent
that is dead, also where containers with processes of their own share the folder above.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

_NAME = re.compile(r"hvdkit-(?:rank|worker)-[\w.-]+-(\d+)")


class Scratch:
    """The folder `hvdkit-NAME-PID` below TMPDIR; `path` is None without a name, and where it cannot be made."""

    def __init__(self, name: str | None) -> None:
        self.path: Path | None = None
        self._above = Path(os.environ.get("TMPDIR") or "/tmp").absolute()
        self._lock = -1
        path = self._above / f"hvdkit-{name}-{os.getpid()}"
        # A full disk, or no such folder: the rank finds another one, or reports what is missing.
        with contextlib.suppress(OSError):
            if name is not None:
                path.mkdir(mode=0o700)
                self._lock = _locked(path)
                self.path = path

    def remove(self) -> None:
        """Remove the folder."""
        if self.path is not None:
            _remove(self.path, self._lock)
            self.path = None

    def remove_those_of_the_dead(self) -> None:
        """Remove the folders of this user's agents that were killed."""
        for folder in self._above.glob("hvdkit-*-*") if self.path is not None else ():
            match = _NAME.fullmatch(folder.name)
            if match and not Path(f"/proc/{match[1]}").exists():
                with contextlib.suppress(OSError):
                    if folder.lstat().st_uid == os.geteuid():
                        _remove(folder, _locked(folder))


def _locked(folder: Path) -> int:
    """A descriptor of the folder that holds its lock. Raises OSError if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _remove(folder: Path, lock: int) -> None:
    import shutil  # here: no rank waits for its import

    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
