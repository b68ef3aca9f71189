"""Atomic writes, and reads with a limit on size and time."""

from __future__ import annotations

import errno
import io
import os
import select
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from hvdkit.errors import RunError

PATIENCE_S = 5.0  # waiting time for the next byte of a pipe, far more than a shell's <(command) needs

_ADVICE = {
    errno.ENOSPC: "free space",
    errno.EDQUOT: "free space, or ask for a larger quota",
    errno.EFBIG: "raise the largest size of files (`ulimit -f`)",
    errno.EROFS: "mount the file system for writing",
    errno.EACCES: "give yourself the permission to write there",
    errno.EPERM: "give yourself the permission to write there",
    errno.EMFILE: "raise the number of open files (`ulimit -n`)",
    errno.ENFILE: "raise the number of open files (`sysctl fs.file-max`)",
    errno.ENOTDIR: "remove the file that is in the place of a folder",
    errno.EEXIST: "remove the file that is in the place of a folder",
    errno.ELOOP: "remove the links that lead in a circle",
    errno.ENOENT: "look for what removes the folder",
}


def write_atomic(path: Path, content: str | bytes, elsewhere: str = "choose another --out") -> None:
    """Write `content` (text as UTF-8) to `path` with a temporary file, fsync and rename.

    A reader sees either the old file or the new one. Raises RunError if that fails, and leaves the old file unchanged;
    `elsewhere` says how the user names another folder.
    """
    with atomic(path, elsewhere) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def atomic(path: Path, elsewhere: str = "choose another --out") -> Iterator[BinaryIO]:
    """A file to write, which becomes `path` once the block has ended without an exception; as `write_atomic`."""
    temporary = None
    try:
        import tempfile  # takes 6 ms, and `hvdkit --help` needs none

        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
        temporary = None
    except OSError as error:
        raise unwritable(path, error, f"or {elsewhere}") from error
    finally:
        if temporary is not None:  # any failure, including an interrupt
            Path(temporary).unlink(missing_ok=True)


def advice(error: OSError) -> str:
    """What to do about an error of writing, in words."""
    return _ADVICE.get(error.errno or 0, "look at the disk, for example by dmesg")


def unwritable(path: Path | str | None, error: OSError, then: str) -> RunError:
    """The error of a file that cannot be written: the system's reason, what to do about that, and `then`."""
    return RunError(f"{path}: cannot be written ({error.strerror or error}); {advice(error)} {then}")


def closed_to_writes(folder: Path) -> str | None:
    """Why this process may not write into a folder, in the system's words; None where it may."""
    if os.access(folder, os.W_OK | os.X_OK):
        return None
    return os.strerror(errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES)


def open_regular(path: Path) -> io.BufferedReader:
    """Open a file for reading. Raises OSError, without waiting, if it is a FIFO, a device or another special file."""
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def read_bounded(path: Path, most: int = 2**28, patience_s: float = PATIENCE_S) -> bytes:
    """The content of a file, or all that a pipe or a terminal sends.

    Raises OSError, also for more than `most` bytes (by default far more than any file that hvdkit writes), for a
    device, and if a pipe sends nothing for `patience_s` seconds.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG and kind != stat.S_IFIFO and not os.isatty(descriptor):
            raise _no_file(kind, path)
        poller = select.poll()
        poller.register(file, select.POLLIN)
        blocks, left = [], most + 1
        while left > 0:
            if not poller.poll(1000 * patience_s):
                raise OSError(
                    errno.ETIMEDOUT, f"it is a pipe, and nothing came through it in {patience_s:g} s", str(path)
                )
            block = file.read(min(left, 2**20))
            if not block:
                break
            blocks.append(block)
            left -= len(block)
    if left == 0:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MiB", str(path))
    return b"".join(blocks)


def open_lock(path: Path) -> io.BufferedRandom:
    """Open a lock file, created if it is missing. Raises OSError if it is not a regular file."""
    return os.fdopen(_open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW), "r+b")


def _open(path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        raise _no_file(kind, path)
    return descriptor


def _no_file(kind: int, path: Path) -> OSError:
    names = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder"}
    return OSError(errno.EINVAL, f"it is {names.get(kind, 'a device')}, not a file", str(path))


def open_standard_streams() -> None:
    """Open descriptors 0, 1 and 2 on /dev/null where they are closed, so that no file gets one of these numbers.

    Whatever prints would write into that file.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            if os.open(os.devnull, os.O_RDWR) != number:  # the lowest free number is taken
                raise AssertionError(f"descriptor {number} is not the lowest free one") from None
            os.set_inheritable(number, True)
