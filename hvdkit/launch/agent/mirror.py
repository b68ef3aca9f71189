"""The run's folder on a host that does not see the launcher's: a copy, whose changes go home (launch/home.py).

Each rank's agent sends the files that have its name, such as its log; the first on a host sends all others. A file
that has only grown is sent from where it ended. A folder of a checkpoint gets its name when it is complete.

Standard library only, and no syntax newer than Python 3.8: see rank_agent.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from hvdkit import handshake
from hvdkit.launch.agent.reports import HOME

if TYPE_CHECKING:
    from http.client import HTTPConnection, HTTPResponse

MARK = "home-"
STOP = "stop"  # of heartbeat.py
OFFSET, DESTINATION, TARGET = "X-Offset", "X-Destination", "X-Target"
AWAY = ".away"  # in a copy: the mark of its job, once it is complete
_LOGS, _CHECKPOINTS = "logs", "checkpoints"
_RESULTS = (_CHECKPOINTS, "tensorboard", "tracking")  # rank 0's
_PASSING = (".beat", ".stack")  # of heartbeat.py, for the agent alone
_LOOK_S = 1.0
_TRIES = 3  # to send what is left once the rank has ended
_PART_BYTES = 2**20
_ANSWER_S, _COPY_S = 60.0, 600.0


class Astray(Exception):
    """The folder cannot be had on this host; the text says why, in one line."""


def mirrored(name: str) -> Mirror | None:
    """The mirror for the rank whose files have this name; None where the host sees the run's folder.

    The variable HOME is JSON: the `folder`; a file in it, the `mark`, by which it is recognized; how to reach the
    launcher. Waits until the copy of the folder is complete. Raises Astray, also in an elastic run, where another host
    may get rank 0 and its files.
    """
    facts = json.loads(os.environ.pop(HOME))
    if Path(facts["mark"]).exists():
        return None
    if os.environ.get("HOROVOD_ELASTIC") == "1":
        where = f"{facts['folder']} on {socket.gethostname()}"
        raise Astray(f"{where}: not the launcher's folder; an elastic run needs an --out that all hosts share")
    mirror = Mirror(facts, name)
    mirror.prepare()
    return mirror


class Mirror:
    """The copy of the run's folder on this host, as far as one rank's agent looks after it."""

    def __init__(self, facts: dict[str, Any], name: str) -> None:
        self._folder = Path(facts["folder"])
        self._mark = Path(facts["mark"])
        self._name = name
        self._addresses, self._port, self._secret = facts["addresses"], facts["port"], facts["secret"]
        self._first = os.environ.get("HOROVOD_LOCAL_RANK", "0") == "0"
        self._of_results = os.environ.get("HOROVOD_RANK") == "0"
        self._sent: dict[str, Any] = {}  # by path: what was sent of it
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._connection: HTTPConnection | None = None
        self._fault: str | None = None

    def prepare(self) -> None:
        """Fetch what the rank needs, or wait until the first agent of this host has. Raises Astray."""
        from http.client import HTTPException

        away, where = self._folder / AWAY, f"{self._folder} on {socket.gethostname()}"
        try:
            if self._first:
                self._fetch(away, where)
            until = time.monotonic() + _COPY_S
            while not away.exists() or away.read_text() != self._mark.name:
                if time.monotonic() > until:
                    raise Astray(f"{where}: no copy of the run's folder within {_COPY_S:.0f} s")
                time.sleep(0.05)
        except (OSError, HTTPException) as error:
            raise Astray(f"{where}: no copy of the run's folder can be made: {_said(error)}") from None

    def start(self) -> None:
        """Begin to send changes."""
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def finish(self) -> str | None:
        """Send what is left, once the rank has ended; returns what went wrong."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._connection is not None:
            self._connection.close()
        return self._fault and f"{self._fault}; they are in {self._folder} there"

    def _follow(self) -> None:
        from http.client import HTTPException

        tries = _TRIES
        while tries:
            over = self._over.wait(_LOOK_S)
            try:
                self._send_changes()
                self._take_stop()
                self._fault = None
            except (OSError, HTTPException) as error:  # also a connection that home has closed, as it was not used
                self._fault, self._connection = _said(error), None
            if over:
                tries = tries - 1 if self._fault else 0

    def _take_stop(self) -> None:
        """Pass on that the launcher asks ranks to end after a checkpoint."""
        stop = self._mark.with_name(STOP)
        if self._first and not stop.exists():
            with contextlib.suppress(FileNotFoundError):
                self._ask("GET", str(stop.relative_to(self._folder))).read()
                stop.touch()

    # What goes home.

    def _send_changes(self) -> None:
        files, links, checkpoints = self._found()
        for path in files:
            self._send_file(path)
        for path, inode in checkpoints.items():
            if self._sent.get(path) != inode:
                self._send_folder(path, inode)
        for path, target in links.items():
            if self._sent.get(path) != target:
                self._ask("LINK", path, {TARGET: quote(target)})
                self._sent[path] = target
        for path in [path for path in self._sent if path not in {*files, *links, *checkpoints}]:
            self._ask("DELETE", path)
            del self._sent[path]

    def _found(self) -> tuple[list[str], dict[str, str], dict[str, int]]:
        """What this agent sends: files, links with their targets, folders of checkpoints with their inodes."""
        files: list[str] = []
        links: dict[str, str] = {}
        checkpoints: dict[str, int] = {}
        for at, folders, names in os.walk(self._folder):
            here = Path(at).relative_to(self._folder)
            keep = [name for name in folders if not name.startswith(".") and not Path(at, name).is_symlink()]
            for name in [*names, *(set(folders) - set(keep))]:
                path = Path(at, name)
                if not self._sends(here, name):
                    continue
                if path.is_symlink():
                    with contextlib.suppress(OSError):  # gone again
                        links[str(here / name)] = str(path.readlink())
                else:
                    files.append(str(here / name))
            if here.name == _CHECKPOINTS:
                for name in sorted(keep) if self._first else ():
                    with contextlib.suppress(OSError):
                        checkpoints[str(here / name)] = Path(at, name).stat().st_ino
                keep = []
            folders[:] = keep
        return files, links, checkpoints

    def _sends(self, here: Path, name: str) -> bool:
        """Whether it is this agent that sends the file of this name."""
        if name.startswith(f"{self._name}."):
            return not name.endswith(_PASSING)
        return self._first and _LOGS not in here.parts and not name.startswith((".", "rank-", "worker-"))

    def _send_file(self, path: str) -> None:
        """Send a file, or what has come to it since it was sent."""
        with contextlib.suppress(FileNotFoundError), (self._folder / path).open("rb") as file:
            stamp, before = _stamp(file.fileno()), self._sent.get(path)
            if before == stamp:
                return
            grown = before is not None and before[0] == stamp[0] and before[1] <= stamp[1]
            offset: int = before[1] if before is not None and grown else 0
            file.seek(offset)
            size = stamp[1] - offset
            self._ask("PUT", path, {OFFSET: str(offset)} if grown else {}, _Part(file, size), size)
            self._sent[path] = stamp

    def _send_folder(self, path: str, inode: int) -> None:
        """Send a checkpoint, which does not change any more, unless it is deleted meanwhile."""
        parent, _, name = path.rpartition("/")
        making = f"{parent}/.{name}.making"
        self._ask("DELETE", making)
        for file in sorted((self._folder / path).glob("*")):
            with file.open("rb") as content:
                size = os.fstat(content.fileno()).st_size
                self._ask("PUT", f"{making}/{file.name}", {}, content, size)
        if (self._folder / path).exists():
            self._ask("MOVE", making, {DESTINATION: quote(path)})
            self._sent[path] = inode
        else:
            self._ask("DELETE", making)

    # What comes from there.

    def _fetch(self, away: Path, where: str) -> None:
        """Make the copy: rank 0's host gets the whole folder, to continue from its checkpoints."""
        if self._folder.is_dir() and any(self._folder.iterdir()) and not away.exists():
            raise Astray(f"{where}: not the launcher's folder, and not empty; remove it there, or choose another --out")
        shutil.rmtree(self._folder, ignore_errors=True)
        (self._folder / _LOGS).mkdir(parents=True)
        away.touch()
        for path, kind in json.loads(self._ask("GET", "").read()):
            steps = path.split("/")
            if (steps[0] == _LOGS and kind != "folder") or (steps[0] in _RESULTS and not self._of_results):
                continue
            local = self._folder / path
            if kind == "folder":
                local.mkdir(parents=True, exist_ok=True)
            elif kind != "file":
                local.symlink_to(kind.partition(" ")[2])
                self._sent[path] = kind.partition(" ")[2]
            else:
                with local.open("wb") as file:
                    shutil.copyfileobj(self._ask("GET", path), file, _PART_BYTES)
                    file.flush()
                    self._sent[path] = _stamp(file.fileno())
        for checkpoint in self._folder.glob(f"{_CHECKPOINTS}/step-*"):  # as one, not file by file
            name = str(checkpoint.relative_to(self._folder))
            self._sent = {path: sent for path, sent in self._sent.items() if not path.startswith(f"{name}/")}
            self._sent[name] = checkpoint.stat().st_ino
        making = away.with_name(f"{AWAY}.new")
        making.write_text(self._mark.name)
        making.replace(away)

    # The way there.

    def _ask(
        self,
        verb: str,
        path: str,
        headers: dict[str, str] | None = None,
        content: Any = None,
        size: int = 0,
    ) -> HTTPResponse:
        """Home's answer; that to GET has to be read. Raises OSError where it refuses, FileNotFoundError among them."""
        connection = self._connection = self._connection or self._connected()
        sent = {"Content-Length": str(size), **(headers or {})}
        connection.request(verb, f"/{quote(path)}", content, sent)
        answer = connection.getresponse()
        if answer.status == 200 and verb == "GET":
            return answer
        said = answer.read().decode("utf-8", "replace")
        if answer.status != 200:
            raise (FileNotFoundError if answer.status == 404 else OSError)(None, f"{path or self._folder}: {said}")
        return answer

    def _connected(self) -> HTTPConnection:
        """A connection to the first of the addresses that answers. Raises OSError."""
        from http.client import HTTPConnection  # where a host sees the folder, nothing of this is loaded

        fault: OSError = OSError(None, "no address of the launcher is known")
        for seconds in (1.0, 10.0):
            for address in self._addresses:
                connection = HTTPConnection(address, self._port, blocksize=_PART_BYTES)
                connection.auto_open = 0  # it would leave out the handshake
                try:
                    connection.sock = handshake.connect(address, self._port, self._secret, seconds)
                except OSError as error:
                    fault = OSError(None, f"the launcher at {address}:{self._port}: {error.strerror or error}")
                    continue
                connection.sock.settimeout(_ANSWER_S)
                connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return connection
        raise fault


class _Part:
    """The next `size` bytes of a file, which may grow meanwhile."""

    def __init__(self, file: Any, size: int) -> None:
        self._file, self._left = file, size

    def read(self, most: int) -> bytes:
        """The next bytes; empty at the end. Raises OSError where the file has become shorter."""
        block: bytes = self._file.read(min(self._left, most))
        if self._left and not block:
            raise OSError(None, "a file has become shorter while it was sent")
        self._left -= len(block)
        return block


def _stamp(descriptor: int) -> tuple[int, int, int]:
    """What tells whether a file has changed: its inode, size and time."""
    stat = os.fstat(descriptor)
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _said(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
