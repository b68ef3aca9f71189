"""Ranks of one machine that exchange bytes through rank 0, for the rarer collectives of baselines."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from multiprocessing.connection import Connection

from hvdkit.errors import RequestError, RunError
from hvdkit.handshake import Listener, connect
from hvdkit.rendezvous import ask

_HOST, _TIMEOUT_S, _PAUSE_S = "127.0.0.1", 120.0, 0.05
_PATH = "/hvdkit/meeting"


class Rendezvous:
    """Connects all `size` ranks of a job; `rank` is this process's rank. The constructor waits for all of them.

    Rank 0 listens on a port that the kernel chooses, and publishes it with its secret on the launcher's rendezvous
    server. Raises RequestError if there is no server, RunError if a rank does not connect within 120 s.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._peers: list[Connection] = []  # on rank 0: ranks 1, 2, …; on the others: rank 0
        if size == 1:
            return
        if rank == 0:
            self._accept()
        else:
            port, secret = _look_up().split()
            self._peers = [_connection(connect(_HOST, int(port), secret, _TIMEOUT_S))]
            self._peers[0].send_bytes(str(rank).encode())

    def _accept(self) -> None:
        connected: dict[int, Connection] = {}
        until = time.monotonic() + _TIMEOUT_S
        with Listener(_HOST) as listener:
            _ask(f"{listener.port} {listener.secret}".encode())
            while len(connected) < self._size - 1:
                for peer in map(_connection, listener.admit(_PAUSE_S)):
                    connected[int(peer.recv_bytes())] = peer
                if time.monotonic() > until:
                    missing = sorted(set(range(1, self._size)) - connected.keys())
                    raise RunError(f"rank(s) {', '.join(map(str, missing))} did not come within {_TIMEOUT_S:.0f} s")
        self._peers = [connected[rank] for rank in sorted(connected)]

    def exchange(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Raises ConnectionError if a rank has exited."""
        if self._size == 1:
            return [mine]
        try:
            if self._rank > 0:
                self._peers[0].send_bytes(mine)
                return [self._peers[0].recv_bytes() for _ in range(self._size)]
            everyone = [mine, *(peer.recv_bytes() for peer in self._peers)]
        except EOFError:
            raise ConnectionResetError("Connection closed by peer") from None  # known to hvdkit.heartbeat
        for peer in self._peers:
            for message in everyone:
                peer.send_bytes(message)
        return everyone

    def close(self) -> None:
        """Close all connections."""
        for peer in self._peers:
            peer.close()


def free_port() -> int:
    """A port of this machine that is free at the moment."""
    with socket.create_server((_HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def _connection(peer: socket.socket) -> Connection:
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.settimeout(None)  # the launcher detects ranks that hang
    return Connection(peer.detach())


def _ask(published: bytes | None = None) -> bytes | None:
    """Look up on the launcher's server what rank 0 has published (None: nothing yet), or publish it."""
    address, port = (os.environ.get(f"HOROVOD_GLOO_RENDEZVOUS_{name}") for name in ("ADDR", "PORT"))
    if not (address and port):
        raise RequestError("--rival: expected Horovod's rendezvous server; start it by `hvdkit train` or `compare`")
    return ask(address, int(port), "GET" if published is None else "PUT", _PATH, published or b"", timeout_s=10)


def _look_up() -> str:
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(TimeoutError):
            if (address := _ask()) is not None:
                return address.decode()
        time.sleep(_PAUSE_S)
    raise RunError(f"rank 0 did not come within {_TIMEOUT_S:.0f} s")
