"""Files that are written whole or not at all, and read no further than memory and patience allow."""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import tempfile
from pathlib import Path

from hvdkit.errors import RunError

PATIENCE_S = 5.0  # for the next byte of a pipe; a shell's <(command) needs far less


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


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file to read it. Raises OSError for what is none, such as a FIFO or a device, without waiting for it."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise _no_file(kind, path)
    return os.fdopen(descriptor, "rb")


def read_bounded(path: Path, most: int = 2**28, patience_s: float = PATIENCE_S) -> bytes:
    """The content of a file, or what a pipe or a terminal sends until its end.

    Raises OSError, also for more than `most` bytes (by default far more than any file of hvdkit's own making has), for
    a device, and for a pipe through which nothing has come for `patience_s`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG and kind != stat.S_IFIFO and not os.isatty(descriptor):
            raise _no_file(kind, path)
        poller = select.poll()
        poller.register(file, select.POLLIN)
        parts, left = [], most + 1
        while left > 0:
            if not poller.poll(1000 * patience_s):
                raise OSError(
                    errno.ETIMEDOUT, f"it is a pipe, and nothing came through it in {patience_s:g} s", str(path)
                )
            part = file.read(min(left, 2**20))
            if not part:
                break
            parts.append(part)
            left -= len(part)
    if left == 0:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return b"".join(parts)


def open_lock(path: Path) -> io.BufferedRandom:
    """Open the file that a lock is taken on, made where it is not there. Raises OSError where that is no plain file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o644)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise _no_file(kind, path)
    return os.fdopen(descriptor, "r+b")


def _no_file(kind: int, path: Path) -> OSError:
    names = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    return OSError(errno.EINVAL, f"it is {names.get(kind, 'a device')}, not a file", str(path))
