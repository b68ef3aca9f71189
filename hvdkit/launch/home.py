"""Results come home: while a job runs, its agents on other hosts read and write the run's folder over HTTP.

An agent on a host that does not see the folder fetches what it needs, and sends back what its rank writes
(agent/mirror.py). Only who knows the job's secret is answered, and nothing outside the folder is touched.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from hvdkit.files import open_regular
from hvdkit.handshake import Listener
from hvdkit.launch.agent.interfaces import listening
from hvdkit.launch.agent.mirror import AWAY, DESTINATION, MARK, OFFSET, TARGET
from hvdkit.launch.agent.reports import HOME
from hvdkit.launch.job import Job

MOST_BYTES = 64 * 2**30  # of a file
_PART_BYTES = 2**20
_TIMEOUT_S = 60.0


@contextlib.contextmanager
def served(job: Job, peers: Sequence[str]) -> Iterator[dict[str, str]]:
    """Serve the job's folder to the agents on `peers` (names or addresses); yields variables for their environment.

    Nothing is served where all ranks run here, now and later. Hosts of an elastic run have to see the folder: nothing
    is served there either, and an agent only finds out whether its host does.
    """
    if job.home is None or (job.here and job.elastic is None):
        yield {}
        return
    (job.home / AWAY).unlink(missing_ok=True)  # the folder is no copy of another host's any more
    seen = job.log_dir / f"{MARK}{secrets.token_hex(8)}"  # an agent that finds this file sees the folder itself
    facts = {"folder": str(job.home.absolute()), "mark": str(seen.absolute())}
    try:
        seen.touch()
        if job.elastic is not None:
            yield {HOME: json.dumps(facts)}
            return
        own, addresses = listening(peers)
        with Listener(own) as listener, _answering(listener, job.home.resolve()):
            way = {"secret": listener.secret, "addresses": addresses, "port": listener.port}
            yield {HOME: json.dumps({**facts, **way})}
    finally:
        seen.unlink(missing_ok=True)


def complain(rank: str, host: str, fault: str) -> None:
    """Say on standard error that what a rank has written did not come home."""
    print(f"{rank} on {host}: not all of its files came home: {fault}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _answering(listener: Listener, folder: Path) -> Iterator[None]:
    """Answer all that the listener admits, each in a thread."""
    over = threading.Event()

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:  # an agent that ends while it is answered is no news
            _Handler(connection, folder)

    def serve() -> None:
        while not over.is_set():
            for connection in listener.admit(0.1):
                threading.Thread(target=answer, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """GET a file, or the folder's list as JSON; PUT a file, whole or from an offset on; DELETE, MOVE, LINK."""

    protocol_version = "HTTP/1.1"
    timeout = _TIMEOUT_S

    def __init__(self, connection: socket.socket, folder: Path) -> None:
        self.folder = folder
        super().__init__(connection, None, None)  # type: ignore[arg-type]  # which are not used

    def log_message(self, *_: Any) -> None:
        """Nothing: the command line shows the run."""

    def do_GET(self) -> None:
        """A file's content; of the folder itself a list of [path, kind]."""
        with self._answered() as path:
            if path == self.folder:
                self._send(json.dumps(_listed(path)).encode())
                return
            if path.is_symlink():
                raise OSError(errno.ELOOP, "expected a file, not a link")
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                self._head(200, size)
                while size > 0 and (block := file.read(min(size, _PART_BYTES))):
                    self.wfile.write(block)
                    size -= len(block)

    def do_PUT(self) -> None:
        """Write a file: atomically, or where an offset is given from there on."""
        with self._answered() as path:
            left = int(self.headers["Content-Length"])
            if not 0 <= left <= MOST_BYTES:
                raise OSError(errno.EFBIG, f"expected at most {MOST_BYTES >> 30} GiB")
            path.parent.mkdir(parents=True, exist_ok=True)
            offset = self.headers.get(OFFSET)
            if offset is not None:
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_NOFOLLOW), "wb") as file:
                    file.seek(int(offset))
                    self._receive(left, file)
                    file.truncate()
            else:
                making = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
                try:
                    with making.open("wb") as file:
                        self._receive(left, file)
                        os.fsync(file.fileno())
                    making.replace(path)
                finally:
                    making.unlink(missing_ok=True)
            self._send()

    def do_DELETE(self) -> None:
        """Remove a file, a link or a folder, if it is there."""
        with self._answered() as path:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
            self._send()

    def do_MOVE(self) -> None:
        """Rename a folder, in place of an older one."""
        with self._answered() as path:
            destination = self._inside(unquote(self.headers[DESTINATION]))
            shutil.rmtree(destination, ignore_errors=True)
            path.rename(destination)
            self._send()

    def do_LINK(self) -> None:
        """Make a link to a name beside it."""
        with self._answered() as path:
            target = unquote(self.headers[TARGET])
            self._inside(str(path.parent.relative_to(self.folder) / target))
            making = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
            making.symlink_to(target)
            making.replace(path)
            self._send()

    @contextlib.contextmanager
    def _answered(self) -> Iterator[Path]:
        """The path that is asked for; what goes wrong becomes the answer, and ends the connection."""
        try:
            yield self._inside(unquote(self.path).lstrip("/"))
        except FileNotFoundError:
            self._send(b"no such file", 404)
        except (OSError, ValueError, TypeError) as error:
            self._send((getattr(error, "strerror", None) or str(error)).encode(), 500)
            raise ConnectionAbortedError from None

    def _inside(self, name: str) -> Path:
        """The path of this name in the folder. Raises OSError for one that leaves it, links followed."""
        path = self.folder / name
        outside = not path.parent.resolve().is_relative_to(self.folder) if name else self.command != "GET"
        if ".." in path.parts or outside:
            raise OSError(errno.EACCES, "expected a path inside the folder")
        return path

    def _receive(self, left: int, file: Any) -> None:
        while left > 0:
            block = self.rfile.read(min(left, _PART_BYTES))
            if not block:
                raise OSError(errno.ECONNRESET, "the connection ended")
            file.write(block)
            left -= len(block)

    def _head(self, status: int, size: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def _send(self, content: bytes = b"", status: int = 200) -> None:
        self._head(status, len(content))
        self.wfile.write(content)


def _listed(folder: Path) -> list[tuple[str, str]]:
    """What is in the folder, with a kind: `file`, `folder`, or `link TARGET`; without names that begin with '.'."""
    entries = []
    for at, folders, names in os.walk(folder):
        here = Path(at)
        for name in sorted([*folders, *names]):
            path = here / name
            if name.startswith("."):
                continue
            kind = f"link {path.readlink()}" if path.is_symlink() else "folder" if path.is_dir() else "file"
            entries.append((str(path.relative_to(folder)), kind))
        folders[:] = [name for name in folders if not name.startswith(".")]
    return entries
