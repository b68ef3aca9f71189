"""A rank's own folder for temporary files.

A rank that is killed cannot remove its own, nor one that leaves without the interpreter's farewell: TensorFlow alone
would leave dozens of files of each rank in /tmp.

Standard library only, as rank_agent.py, which it is a part of.
"""

from __future__ import annotations

import os
from pathlib import Path


class Scratch:
    """A folder below TMPDIR; none at all where `name` is None."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._folder: Path | None = None

    def make(self) -> dict[str, str]:
        """Make the folder; what a process's environment then has to have. Nothing where it cannot be made."""
        if self._name is None:
            return {}
        folder = Path(os.environ.get("TMPDIR") or "/tmp").absolute() / self._name
        try:
            folder.mkdir(mode=0o700)
        except OSError:  # a full disk, or no such folder: the rank finds one by itself, or says what it lacks
            return {}
        self._folder = folder
        return {"TMPDIR": str(folder)}

    def remove(self) -> None:
        """Remove the folder with all that is in it."""
        if self._folder is not None:
            import shutil  # at the end: a rank need not wait for it

            shutil.rmtree(self._folder, ignore_errors=True)
