"""What a link between two hosts carries: the part of `host_probe.py` that sends and receives over TCP.

Standard library only, and no syntax newer than Python 3.8: see host_probe.py.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import socket
import statistics
import struct
import time
from typing import Any

from hvdkit.handshake import connect
from hvdkit.launch.agent.interfaces import interface_of

_PING, _BYTES = b"p", b"b"  # what a connection is for
_PINGS, _WARM_UP = 50, 5
_CHUNK_BYTES, _BUFFER_BYTES = 2**16, 2**20
_WINDOW_S = 0.1  # a rate is of so long
_SILENCE_S = 10.0
_SIOCETHTOOL, _ETHTOOL_GSET = 0x8946, 0x1  # linux/sockios.h, linux/ethtool.h
_NO_SPEED = (0, 0xFFFF, 0xFFFFFFFF)


def serve_link(connection: socket.socket) -> None:
    """Answer one connection of `measure_link` until its end."""
    connection.settimeout(_SILENCE_S)
    with connection, contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        kind = connection.recv(1)
        if kind == _PING:
            while connection.recv(1):
                connection.sendall(_PING)
        elif kind == _BYTES:
            connection.sendall(json.dumps(_rates(connection)).encode())


def measure_link(address: str, port: int, token: str, sending_s: float) -> dict[str, Any]:
    """Round trips of one byte, and the rate of bytes that are sent for so long, as the receiver gets them.

    Returns `latency_us` (median), `latency_p95_us`, `mbit_per_s` (median of windows of 0.1 s), its `low_mbit_per_s`
    and `high_mbit_per_s`, and `rated_mbit_per_s` of this host's interface (None: unknown); or a `fault`.
    """
    try:
        with connect(address, port, token, _SILENCE_S) as line:
            source = line.getsockname()[0]
            trips = _round_trips_us(line)
        with connect(address, port, token, _SILENCE_S) as line:
            rates = _sent(line, sending_s)
    except (OSError, EOFError, ValueError) as error:
        return {"fault": getattr(error, "strerror", None) or str(error) or "no answer"}
    return {
        "latency_us": round(statistics.median(trips), 1),
        "latency_p95_us": round(sorted(trips)[int(0.95 * len(trips))], 1),
        "mbit_per_s": statistics.median(rates),
        "low_mbit_per_s": min(rates),
        "high_mbit_per_s": max(rates),
        "rated_mbit_per_s": _speed(interface_of(source)),
    }


def _round_trips_us(line: socket.socket) -> list[float]:
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    line.sendall(_PING)
    trips = []
    for _ in range(_WARM_UP + _PINGS):
        begin = time.perf_counter()
        line.sendall(_PING)
        if not line.recv(1):
            raise EOFError("the other host has closed the connection")
        trips.append(1e6 * (time.perf_counter() - begin))
    return trips[_WARM_UP:]


def _sent(line: socket.socket, seconds: float) -> list[float]:
    """Send for so long; returns the rates that the receiver has seen."""
    line.sendall(_BYTES)
    chunk, until = bytes(_CHUNK_BYTES), time.monotonic() + seconds
    while time.monotonic() < until:
        line.sendall(chunk)
    line.shutdown(socket.SHUT_WR)
    line.settimeout(_SILENCE_S + 2 * seconds)  # what buffers hold takes its time over a slow link
    answer = b""
    while True:
        received = line.recv(4096)
        if not received:
            break
        answer += received
    rates: list[float] = json.loads(answer)
    if not rates:
        raise ValueError("nothing came through")
    return rates


def _rates(connection: socket.socket) -> list[float]:
    """The Mbit/s of each window until the sender's end, without the first quarter, in which TCP speeds up."""
    buffer = bytearray(_BUFFER_BYTES)
    total = connection.recv_into(buffer)
    marks = [(time.perf_counter(), total)]
    while True:
        count = connection.recv_into(buffer)
        now, total = time.perf_counter(), total + count
        if not count:
            break
        if now - marks[-1][0] >= _WINDOW_S:
            marks.append((now, total))
    if len(marks) < 3:  # too short for windows: one rate of all
        marks = [marks[0], (now, total)] if total > marks[0][1] else []
    pairs = zip(marks, marks[1:])  # noqa: B905, RUF007 - Python 3.8
    rates = [8e-6 * (after[1] - before[1]) / (after[0] - before[0]) for before, after in pairs]
    return rates[len(rates) // 4 :]


def _speed(interface: str | None) -> int | None:
    """The Mbit/s at which the interface is rated, by its driver (as `ethtool` shows); None where it says nothing."""
    settings = array.array("B", struct.pack("I40x", _ETHTOOL_GSET))
    request = struct.pack("16sP", (interface or "").encode()[:15], settings.buffer_info()[0])
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request.ljust(40, b"\0"))
    except OSError:
        return None
    low, high = struct.unpack_from("H", settings, 12)[0], struct.unpack_from("H", settings, 28)[0]
    speed = low | high << 16
    return None if speed in _NO_SPEED else speed
