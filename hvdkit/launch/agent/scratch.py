"""A rank's own folder for temporary files.

A rank that is killed, or that ends without the interpreter's clean-up, leaves its temporary files behind: TensorFlow's
alone are dozens for each rank.

Standard library only, and no syntax newer than Python 3.8: see rank_agent.py.
"""

from __future__ import annotations

import os
from pathlib import Path


class Scratch:
    """A folder below TMPDIR; none where `name` is None."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._folder: Path | None = None

    def make(self) -> dict[str, str]:
        """Make the folder; returns the environment variables that lead to it, none where it cannot be made."""
        if self._name is None:
            return {}
        folder = Path(os.environ.get("TMPDIR") or "/tmp").absolute() / self._name
        try:
            folder.mkdir(mode=0o700)
        except OSError:  # a full disk, or no such folder: the rank finds another one, or reports what is missing
            return {}
        self._folder = folder
        return {"TMPDIR": str(folder)}

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        if self._folder is not None:
            import shutil  # here: no rank waits for its import

            shutil.rmtree(self._folder, ignore_errors=True)
