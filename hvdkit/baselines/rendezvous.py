"""Ranks of one machine that exchange bytes through rank 0: for what is rare, whatever the rival trains by."""

from __future__ import annotations

import os
import socket
import struct
import time
import urllib.error
import urllib.request

from hvdkit.errors import RequestError, RunError

_HOST, _TIMEOUT_S, _PAUSE_S = "127.0.0.1", 120.0, 0.05
_LENGTH = struct.Struct("!Q")
_URL = "http://{address}:{port}/hvdkit/meeting"


class Meeting:
    """All of a job's `size` ranks, once each has come; `rank` is this one.

    Rank 0 listens on a port that the kernel chooses, and tells it through the launcher's rendezvous server. Raises
    RequestError where there is none, RunError where a rank does not come within 120 s.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._peers: list[socket.socket] = []  # of rank 0: ranks 1, 2, …; of the others: rank 0
        if size == 1:
            return
        if rank == 0:
            self._receive()
        else:
            peer = socket.create_connection((_HOST, int(_ask())), timeout=_TIMEOUT_S)
            _send(peer, str(rank).encode())
            self._peers = [peer]
        for peer in self._peers:
            peer.settimeout(None)  # a rank that hangs is the launcher's affair
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _receive(self) -> None:
        came: dict[int, socket.socket] = {}
        with socket.create_server((_HOST, 0)) as listener:
            listener.settimeout(_TIMEOUT_S)
            _tell(str(listener.getsockname()[1]))
            while len(came) < self._size - 1:
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self._size)) - came.keys())
                    raise RunError(
                        f"rank(s) {', '.join(map(str, missing))} did not come within {_TIMEOUT_S:.0f} s"
                    ) from None
                peer.settimeout(_TIMEOUT_S)
                came[int(_receive(peer))] = peer
        self._peers = [came[rank] for rank in sorted(came)]

    def exchange(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Raises ConnectionError where a rank is gone."""
        if self._size == 1:
            return [mine]
        if self._rank > 0:
            _send(self._peers[0], mine)
            return [_receive(self._peers[0]) for _ in range(self._size)]
        everyone = [mine, *(_receive(peer) for peer in self._peers)]
        for peer in self._peers:
            for each in everyone:
                _send(peer, each)
        return everyone

    def close(self) -> None:
        """Leave."""
        for peer in self._peers:
            peer.close()


def free_port() -> int:
    """A port of this machine that nobody listens on now."""
    with socket.create_server((_HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def _send(peer: socket.socket, data: bytes) -> None:
    peer.sendall(_LENGTH.pack(len(data)) + data)


def _receive(peer: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(peer, _LENGTH.size))
    return _exactly(peer, length)


def _exactly(peer: socket.socket, length: int) -> bytes:
    data = bytearray(length)
    view, done = memoryview(data), 0
    while done < length:
        count = peer.recv_into(view[done:])
        if count == 0:
            raise ConnectionResetError("Connection closed by peer")  # known to hvdkit.core.heartbeat
        done += count
    return bytes(data)


def _url() -> str:
    address = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_ADDR")
    port = os.environ.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
    if not (address and port):
        raise RequestError("--rival: expected Horovod's rendezvous server; start rivals by `hvdkit train` or `compare`")
    return _URL.format(address=address, port=port)


def _open(request: urllib.request.Request) -> bytes:
    # An opener of its own: a proxy in the environment knows nothing of this machine's ports.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return bytes(answer.read())


def _tell(value: str) -> None:
    _open(urllib.request.Request(_url(), data=value.encode(), method="PUT"))


def _ask() -> str:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return _open(urllib.request.Request(_url())).decode()
        except urllib.error.HTTPError as error:
            if error.code != 404:  # not told yet
                raise
        except TimeoutError:
            pass
        if time.monotonic() > deadline:
            raise RunError(f"rank 0 did not come within {_TIMEOUT_S:.0f} s")
        time.sleep(_PAUSE_S)
