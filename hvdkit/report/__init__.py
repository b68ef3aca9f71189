"""What people read. The package is a function too: `hvdkit.report(folder)`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from types import ModuleType

# If the home folder cannot be written, matplotlib logs two long lines each time, and works without it.
logging.getLogger("matplotlib").setLevel(logging.ERROR)


class _Report(ModuleType):
    def __call__(self, folder: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> tuple[Path, Path]:
        """Write report.html and report.md about the results in `folder`, into `out` or there; returns their paths.

        Raises RequestError if the folder has no results, or damaged ones, or if `out` cannot be written.
        """
        from hvdkit.report import page

        return page.write(Path(folder), None if out is None else Path(out))


sys.modules[__name__].__class__ = _Report  # `hvdkit.report` is the package as soon as a part of it is imported
