"""What agents report, line by line: on their standard output, or over a connection to a listener. And their clocks."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hvdkit.handshake import Listener, notice_loss
from hvdkit.launch.agent.reports import MARK, boot_id

_LONGEST_LINE = 2**20  # bytes of a report, and more than any has


@dataclass
class AgentStream:
    """What one agent reports: on the standard output of its `process`, or over a `connection`.

    `name` is that of the rank's files; None for a program that starts ranks, and until an agent that has connected
    reports its start.
    """

    process: subprocess.Popen[bytes] | None = None
    connection: socket.socket | None = None
    name: str | None = None
    buffer: bytes = b""


class Streams:
    """The streams of all agents that run. Agents that a program of the cluster starts connect to `listener`."""

    def __init__(self, listener: Listener | None) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self.open: list[AgentStream] = []
        if listener is not None:
            self._selector.register(listener, selectors.EVENT_READ)

    def add(self, source: Any, stream: AgentStream) -> None:
        """Read from an agent: `source` is its pipe or its socket."""
        self.open.append(stream)
        self._selector.register(source, selectors.EVENT_READ, stream)

    def read(self, timeout_s: float) -> Iterator[tuple[AgentStream, dict[str, Any] | None, float]]:
        """What comes within this time: each report with its stream, and when it came by the monotonic clock.

        The report is None where the stream has ended.
        """
        for key, _ in self._selector.select(timeout_s):
            received = time.monotonic()
            stream: AgentStream | None = key.data
            if stream is None:  # the listener
                continue
            try:
                data = os.read(key.fd, 65536)
            except BlockingIOError:
                continue
            except OSError:  # the agent's machine, or the way to it, is gone
                data = b""
            *lines, stream.buffer = (stream.buffer + data).split(b"\n")
            yield from ((stream, report, received) for report in map(_report, lines) if report is not None)
            if not data or len(stream.buffer) > _LONGEST_LINE:
                self._selector.unregister(key.fileobj)
                self.open.remove(stream)
                yield stream, None, received
                if stream.connection is not None:
                    stream.connection.close()
        for connection in () if self._listener is None else self._listener.admit():
            notice_loss(connection)
            self.add(connection, AgentStream(connection=connection))

    def connections(self, name: str | None = None) -> list[socket.socket]:
        """The connections of all agents that are connected over TCP, or of the one whose rank has this name."""
        wanted = (stream for stream in self.open if name in (None, stream.name))
        return [stream.connection for stream in wanted if stream.connection is not None]

    def send(self, line: str) -> None:
        """Send a line to the agents that are connected over TCP."""
        for connection in self.connections():
            with contextlib.suppress(OSError):
                connection.send(f"{line}\n".encode())

    def end_connected(self, name: str | None = None) -> bool:
        """Ask the agents that are connected over TCP, or that of one rank, to end their ranks and report their ends.

        Returns whether there are any.
        """
        connections = self.connections(name)
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
        return bool(connections)

    def close(self) -> None:
        """Close what is open."""
        self._selector.close()
        for connection in self.connections():
            connection.close()


class Clocks:
    """How far other machines' monotonic clocks, which count from their boot, are ahead of or behind this one's.

    Wall clocks are not used: they differ between hosts and can be set at any time.
    """

    def __init__(self) -> None:
        self._boot = boot_id()
        self._behind: dict[str, float] = {}

    def note(self, name: str, clock: float, boot: str | None, received: float) -> None:
        """Use a report of the agent `name`, sent at its `clock`. The report with the shortest way is the most exact."""
        if boot is not None and boot == self._boot and clock <= received:
            self._behind[name] = 0.0  # the same clock
        else:
            self._behind[name] = min(received - clock, self._behind.get(name, float("inf")))

    def here(self, name: str, clock: float) -> float:
        """A time of that agent's clock as a time of this machine's."""
        return clock + self._behind.get(name, 0.0)


def _report(line: bytes) -> dict[str, Any] | None:
    """The report in a line; None for anything else."""
    _, mark, text = line.decode("utf-8", "replace").partition(MARK)
    try:
        report = json.loads(text) if mark else {}
        report["clock"] = float(report["clock"])
        return report if {"name", "event", "rank"} <= report.keys() else None
    except (ValueError, KeyError, TypeError):
        return None
