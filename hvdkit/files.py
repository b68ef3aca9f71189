"""Files that are written whole or not at all, and read no further than memory allows."""

from __future__ import annotations

import errno
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
        temporary = None
    except OSError as error:
        raise RunError(f"{path}: cannot be written ({error.strerror}); free space or choose another --out") from error
    finally:
        if temporary is not None:  # whatever came between, an interrupt too
            Path(temporary).unlink(missing_ok=True)


def read_bounded(path: Path, most: int = 2**28) -> bytes:
    """A file's content. Raises OSError, also where it has more than `most` bytes, as a device without end has.

    By default that is far more than any file of hvdkit's own making has.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return content
