"""One writer for a run's folder: a lock that other processes and other hosts see, and that a dead writer loses."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from hvdkit.errors import RequestError
from hvdkit.files import open_lock
from hvdkit.usage import machine as _boot  # another one after a reboot, and on each machine

NAME = ".lock"
BEAT_S = 10.0  # between two signs of life
DEAD_S = 60.0  # without one, after which the writer on another host counts as dead
_ENDING_S = 5.0  # for the children of a dead writer, which hold its lock on until they end
_SETTLING_S = 0.5
_MOST_BYTES = 4096
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # of a file system without flock


class FolderLock:
    """The lock `.lock` of a folder that exists, held until `release`; raises RequestError if another run holds it.

    On one host `flock` decides. The file also has the writer's host, process and start, and its time is renewed every
    `BEAT_S` seconds: that decides where another host has written it, and where the file system has no locks.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._folder = folder
        self._ended = threading.Event()
        try:
            self._file = open_lock(self._path)
        except OSError as error:
            raise RequestError(
                f"--out {folder}: cannot be written ({error.strerror}); choose another folder"
            ) from error
        try:
            self._acquire()
        except BaseException:
            self._file.close()
            raise
        self._beating = threading.Thread(target=self._beat, name="folder lock", daemon=True)
        self._beating.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the lock; once is enough, and twice does no harm."""
        if self._file.closed:
            return
        self._ended.set()
        self._beating.join()
        with suppress(OSError):  # on a disk that has become read-only it stays, as a dead run's
            if self._mine():
                self._path.unlink()
        self._file.close()

    def _acquire(self) -> None:
        deadline = time.monotonic() + _ENDING_S
        while (locked := self._locked()) is False:
            if not _ended_here(_owner(self._path)) or time.monotonic() > deadline:
                raise self._taken()
            time.sleep(0.1)
        if not self._mine():  # a run that has just ended deletes its file, and a lock on a deleted file locks nothing
            raise self._taken()
        owner = _owner(self._path)
        if owner and not (locked and owner["boot"] == _boot()):
            here = owner["boot"] == _boot() and owner["pids"] == _pids()
            if not _ended_here(owner) if here else _silent_s(self._path) < DEAD_S:
                raise self._taken()
            if not here:
                print(f"{self._folder}: {_named(owner)} wrote there and gives no sign of life; its lock is taken over",
                      file=sys.stderr, flush=True)  # fmt: skip
        self._sign()
        if locked is None:  # two may have come together
            time.sleep(_SETTLING_S)
            owner = _owner(self._path)
            if owner and (owner["boot"], owner["pids"], owner["pid"]) != (_boot(), _pids(), os.getpid()):
                raise self._taken()

    def _locked(self) -> bool | None:
        """Whether the file is locked for this process; None where the file system has no locks."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return None
            raise RequestError(
                f"--out {self._folder}: {self._path} cannot be locked ({error.strerror}); choose another folder"
            ) from error
        return True

    def _mine(self) -> bool:
        """Whether the file in the folder is the one that this process has opened."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        return False

    def _sign(self) -> None:
        started = _start_of(os.getpid())
        text = {"host": socket.gethostname(), "pid": os.getpid(), "started": started, "boot": _boot(), "pids": _pids(),
                "since": time.strftime("%Y-%m-%d %H:%M:%S%z")}  # fmt: skip
        with suppress(OSError):  # a full disk: flock holds without the names
            self._file.seek(0)
            self._file.truncate()
            self._file.write(json.dumps(text).encode())
            self._file.flush()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(OSError):
                os.utime(self._file.fileno())
                if not self._path.exists() and self._folder.is_dir():  # somebody has emptied the folder
                    self._sign_anew()

    def _sign_anew(self) -> None:
        """Make the file again: the folder is still written by this process."""
        again = open_lock(self._path)
        try:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # of a run that has come meanwhile
            again.close()
            return
        self._file.close()
        self._file = again
        self._sign()

    def _taken(self) -> RequestError:
        owner = _owner(self._path)
        who = f" ({_named(owner)})" if owner else ""
        hint = "choose another folder"
        if owner and owner["boot"] != _boot():
            hint += f"; if that run was killed, its lock ends {DEAD_S:.0f} s after it"
        return RequestError(f"--out {self._folder}: another run is writing there{who}; {hint}")


def _owner(path: Path) -> dict[str, Any] | None:
    """Who has written the lock; None for a file without it, such as an earlier version's."""
    try:
        with path.open("rb") as file:
            owner = json.loads(file.read(_MOST_BYTES))
        texts = {key: str(owner[key]) for key in ("host", "boot", "pids", "since")}
        if not all(re.fullmatch(r"[\w.:+ \[\]-]{0,100}", text) for text in texts.values()):
            return None
        return texts | {"pid": int(owner["pid"]), "started": int(owner["started"])}
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _named(owner: dict[str, Any]) -> str:
    return f"process {owner['pid']} on {owner['host']}, since {owner['since']}"


def _ended_here(owner: dict[str, Any] | None) -> bool:
    """Whether the owner was a process of this machine that has ended; its number may be another's by now."""
    if owner is None or (owner["boot"], owner["pids"]) != (_boot(), _pids()):
        return False
    return _start_of(owner["pid"]) != int(owner["started"])


def _silent_s(path: Path) -> float:
    """The seconds since the last sign of life, by the clock of the file system, which may be another machine's."""
    probe = path.with_name(f".{NAME}.{os.getpid()}")
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except OSError:
        return time.time() - path.stat().st_mtime if path.exists() else 0.0
    finally:
        probe.unlink(missing_ok=True)


def _pids() -> str:
    """The namespace that numbers of processes belong to: a container has its own."""
    with suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""


def _start_of(pid: int) -> int:
    """When a process started, in clock ticks since the start of the machine; -1 if it has ended."""
    fields = _text(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 and fields[0] not in "ZX" else -1


def _text(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace").strip()
    return ""
