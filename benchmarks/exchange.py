"""How long two processes need to average as many bytes as a step sends, over bare TCP sockets: the least for a ring.

    .venv/bin/python -m benchmarks.exchange [BYTES] [COMPUTING_MS]

Each process computes for so long, as a rank does before it sends, and then sums and averages float32 values with its
neighbor: half of them each way, twice (Patarasuk and Yuan 2009). Nothing is negotiated, packed or unpacked.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import time

import numpy as np

TIMES, LEFT_OUT = 200, 20


def exchange_ms(size: int, computing_ms: float) -> list[float]:
    """The milliseconds of TIMES exchanges of `size` bytes, without the computing and the wait for the neighbor."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if not child:
            with socket.create_connection(server.getsockname()) as connection:
                _take_part(connection, 1, size, computing_ms)
            os._exit(0)
        try:
            with server.accept()[0] as connection:
                return _take_part(connection, 0, size, computing_ms)[LEFT_OUT:]
        finally:
            os.waitpid(child, 0)


def _take_part(connection: socket.socket, rank: int, size: int, computing_ms: float) -> list[float]:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    values, got, ready = np.ones(size // 4, np.float32), np.empty(size // 8, np.float32), bytearray(1)
    halves = values[: size // 8], values[size // 8 : 2 * (size // 8)]
    own, other = halves[rank], halves[1 - rank]
    matrix, found = np.ones((128, 128), np.float32), []
    for _ in range(LEFT_OUT + TIMES):
        until = time.perf_counter() + computing_ms / 1e3
        while time.perf_counter() < until:
            matrix @ matrix
        connection.sendall(b"-")
        _receive(connection, memoryview(ready))
        began = time.perf_counter()
        _both_ways(connection, other, got)
        own += got
        own /= 2
        _both_ways(connection, own, other)
        found.append(1e3 * (time.perf_counter() - began))
    return found


def _both_ways(connection: socket.socket, out: np.ndarray, into: np.ndarray) -> None:
    sender = threading.Thread(target=connection.sendall, args=(memoryview(out).cast("B"),))
    sender.start()
    _receive(connection, memoryview(into).cast("B"))
    sender.join()


def _receive(connection: socket.socket, into: memoryview) -> None:
    while into:
        into = into[connection.recv_into(into) :]


if __name__ == "__main__":
    asked, computing = int(sys.argv[1]), float(sys.argv[2])
    ms = exchange_ms(asked, computing)
    print(f"{asked} bytes: {statistics.median(ms):.2f} ms, median of {TIMES} (least {min(ms):.2f})")
