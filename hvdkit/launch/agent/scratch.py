"""A rank's own folder for temporary files.

A rank that is killed, or that ends without the interpreter's clean-up, leaves its temporary files behind: TensorFlow's
alone are dozens for each rank.

Standard library only, and no syntax newer than Python 3.8: see rank_agent.py.
"""

from __future__ import annotations

import os
from pathlib import Path


def make(name: str) -> Path | None:
    """A new folder of that name below TMPDIR; None where it cannot be made."""
    folder = Path(os.environ.get("TMPDIR") or "/tmp").absolute() / name
    try:
        folder.mkdir(mode=0o700)
    except OSError:  # a full disk, or no such folder: the rank finds another one, or reports what is missing
        return None
    return folder


def remove(folder: Path | None) -> None:
    """Remove the folder, if there is one, with all that is in it."""
    if folder is not None:
        import shutil  # here: no rank waits for its import

        shutil.rmtree(folder, ignore_errors=True)
