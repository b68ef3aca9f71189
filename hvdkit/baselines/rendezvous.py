"""Ranks of one machine that exchange bytes through rank 0, for the rarer collectives of baselines."""

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


class Rendezvous:
    """Connects all `size` ranks of a job; `rank` is this process's rank. The constructor waits for all of them.

    Rank 0 listens on a port that the kernel chooses, and publishes it on the launcher's rendezvous server. Raises
    RequestError if there is no server, RunError if a rank does not connect within 120 s.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size
        self._peers: list[socket.socket] = []  # on rank 0: ranks 1, 2, …; on the others: rank 0
        if size == 1:
            return
        if rank == 0:
            self._accept()
        else:
            peer = socket.create_connection((_HOST, int(_look_up())), timeout=_TIMEOUT_S)
            _send(peer, str(rank).encode())
            self._peers = [peer]
        for peer in self._peers:
            peer.settimeout(None)  # the launcher detects ranks that hang
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _accept(self) -> None:
        connected: dict[int, socket.socket] = {}
        with socket.create_server((_HOST, 0)) as listener:
            listener.settimeout(_TIMEOUT_S)
            _publish(str(listener.getsockname()[1]))
            while len(connected) < self._size - 1:
                try:
                    peer, _ = listener.accept()
                except TimeoutError:
                    missing = sorted(set(range(1, self._size)) - connected.keys())
                    raise RunError(
                        f"rank(s) {', '.join(map(str, missing))} did not come within {_TIMEOUT_S:.0f} s"
                    ) from None
                peer.settimeout(_TIMEOUT_S)
                connected[int(_receive(peer))] = peer
        self._peers = [connected[rank] for rank in sorted(connected)]

    def exchange(self, mine: bytes) -> list[bytes]:
        """Every rank's bytes, by rank. Raises ConnectionError if a rank has exited."""
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
        """Close all connections."""
        for peer in self._peers:
            peer.close()


def free_port() -> int:
    """A port of this machine that is free at the moment."""
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
    # Without the environment's proxy, which cannot reach this machine's ports.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=10) as answer:
        return bytes(answer.read())


def _publish(value: str) -> None:
    _open(urllib.request.Request(_url(), data=value.encode(), method="PUT"))


def _look_up() -> str:
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            return _open(urllib.request.Request(_url())).decode()
        except urllib.error.HTTPError as error:
            if error.code != 404:  # not published yet
                raise
        except TimeoutError:
            pass
        if time.monotonic() > deadline:
            raise RunError(f"rank 0 did not come within {_TIMEOUT_S:.0f} s")
        time.sleep(_PAUSE_S)
