"""Files that are either whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hvdkit.errors import RunError


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) to `path` by temporary file, fsync and rename.

    A reader sees the old file or the new one, never a part. Raises RunError where the disk or the
    permissions do not allow it; the old file is then untouched.
    """
    temporary = None
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise RunError(f"{path}: cannot be written ({error.strerror}); free space or choose another --out") from error
