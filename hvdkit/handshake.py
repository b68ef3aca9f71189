"""A port that lets in only those who know a secret, and the way in.

The port sends a random challenge to each connection. The client answers with a challenge of its own and an HMAC of
both, then the port proves in the same way that it knows the secret. The secret itself is not sent, and what was
recorded on the network opens no port. What is sent after the handshake is neither encrypted nor signed.

Standard library only, and no syntax newer than Python 3.8: see launch/agent/rank_agent.py.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import resource
import secrets
import selectors
import socket
import time
from typing import Any

ANSWER_S = 5.0  # for a connection to prove that it knows the secret
MOST_STRANGERS = 256  # connections that have not proved it yet; the oldest gives way
_YOUNG_S = 0.25  # an honest client answers within this time, and gives way to none
_PAUSE_S = 0.05
_BACKLOG = 1024  # all ranks connect at once
_CHALLENGE, _PROOF = 33, 65  # bytes, with the end of the line
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# A machine that has lost its power says no good-bye. 20 s of silence, then four questions.
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 20,
    socket.TCP_KEEPINTVL: 10,
    socket.TCP_KEEPCNT: 4,
    socket.TCP_USER_TIMEOUT: 60_000,  # ms, for what is sent and not acknowledged
}


class Listener:
    """A port at an IPv4 address of this machine, or at all its addresses, IPv6 too ("").

    It can be registered at a selector: `admit` has something to do where it is readable. Strangers cannot use it up: it
    reads 98 bytes of each, and closes their connections after ANSWER_S seconds or where there are too many.

    Raises OSError where this machine has no such address.
    """

    def __init__(self, address: str, secret: str = "") -> None:
        self.secret = secret or secrets.token_hex(16)
        self._socket = _listening(address)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._strangers: dict[socket.socket, _Stranger] = {}  # the oldest first
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = min(MOST_STRANGERS, max(1, files // 4)) if files != resource.RLIM_INFINITY else MOST_STRANGERS
        self._selector = selectors.DefaultSelector()
        self._accepts = False

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def fileno(self) -> int:
        """For a selector."""
        self._resume()
        return self._selector.fileno()

    def admit(self, timeout_s: float = 0.0) -> list[socket.socket]:
        """The connections, not blocking, that have proved within this time that they know the secret.

        To be called a few times a second, as it also closes connections of strangers.
        """
        self._resume()
        admitted = []
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._accept()
            elif key.data.connection in self._strangers and self._knows(key.data):
                admitted.append(key.data.connection)
        late = time.monotonic() - ANSWER_S
        while self._drop_oldest(before=late):
            pass
        return admitted

    def close(self) -> None:
        """Close the port and the connections of strangers."""
        while self._drop_oldest():
            pass
        self._selector.close()
        self._socket.close()

    def _resume(self) -> None:
        if not self._accepts:
            self._selector.register(self._socket, selectors.EVENT_READ)
            self._accepts = True

    def _accept(self) -> None:
        """Send challenges to those that connect. Where there is no room, the rest waits for the next call."""
        while True:
            room = len(self._strangers) < self._most or self._drop_oldest(before=time.monotonic() - _YOUNG_S)
            try:
                if not room:
                    break
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_FILES and not self._drop_oldest():
                    break
                continue  # it is gone again
            stranger = _Stranger(connection)
            self._strangers[connection] = stranger
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            connection.setblocking(False)
            try:
                connection.send(stranger.challenge)
            except OSError:
                self._drop(connection)
        self._selector.unregister(self._socket)
        self._accepts = False

    def _knows(self, stranger: _Stranger) -> bool:
        """Read of its answer what is there; whether it is complete and right, and so it is no stranger any more."""
        try:
            received = stranger.connection.recv(_CHALLENGE + _PROOF - len(stranger.answer))
        except BlockingIOError:
            return False
        except OSError:
            received = b""
        stranger.answer += received
        if received and len(stranger.answer) < _CHALLENGE + _PROOF:
            return False
        theirs, proof = stranger.answer[:_CHALLENGE], stranger.answer[_CHALLENGE:]
        if hmac.compare_digest(proof, _proof(self.secret, "client", stranger.challenge, theirs)):
            with contextlib.suppress(OSError):
                stranger.connection.send(_proof(self.secret, "port", stranger.challenge, theirs))
                self._forget(stranger.connection)
                return True
        self._drop(stranger.connection)
        return False

    def _drop_oldest(self, before: float = float("inf")) -> bool:
        """Close the connection of the stranger that came first, if that was before this time; whether it was."""
        oldest = next(iter(self._strangers.values()), None)
        if oldest is None or oldest.came >= before:
            return False
        self._drop(oldest.connection)
        return True

    def _drop(self, connection: socket.socket) -> None:
        self._forget(connection)
        connection.close()

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._strangers[connection]


class _Stranger:
    """A connection that has not proved yet that it knows the secret."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.came = time.monotonic()
        self.challenge = _challenge()
        self.answer = b""


def connect(address: str, port: int, secret: str, timeout_s: float) -> socket.socket:
    """A connection to a Listener, with this timeout. Tries again where strangers keep the port busy.

    Raises OSError where there is no such port, PermissionError where it is another program's, with another secret.
    """
    until = time.monotonic() + timeout_s
    while True:
        connection = socket.create_connection((address, port), timeout_s)
        try:
            _introduce(connection, secret)
            return connection
        except OSError:
            connection.close()
            if time.monotonic() > until:
                raise
        time.sleep(_PAUSE_S)


def _introduce(connection: socket.socket, secret: str) -> None:
    """The client's part of the handshake."""
    ours, theirs = _challenge(), _exactly(connection, _CHALLENGE)
    connection.sendall(ours + _proof(secret, "client", theirs, ours))
    said = b""
    with contextlib.suppress(ConnectionError):
        said = _exactly(connection, _PROOF)
    if not hmac.compare_digest(said, _proof(secret, "port", theirs, ours)):
        raise PermissionError(errno.EACCES, "another program has this port")


def _exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        received = connection.recv(count - len(data))
        if not received:
            raise ConnectionResetError(errno.ECONNRESET, "the port has closed the connection")
        data += received
    return data


def _challenge() -> bytes:
    return secrets.token_hex(16).encode() + b"\n"


def _proof(secret: str, who: str, challenge: bytes, answer: bytes) -> bytes:
    """The line by which `who` proves to know the secret."""
    said = who.encode() + b"\n" + challenge + answer
    return hmac.new(secret.encode(), said, "sha256").hexdigest().encode() + b"\n"


def _listening(address: str) -> socket.socket:
    if not address and socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("::", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server((address or "0.0.0.0", 0), backlog=_BACKLOG)


def notice_loss(connection: socket.socket) -> None:
    """Have the kernel end the connection where nothing comes from the other machine for a minute, not even a "no"."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
