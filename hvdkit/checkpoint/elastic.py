"""Elastic training: attempts, one after another, each with the ranks that Horovod's rendezvous has at that time.

Horovod's elastic driver (`horovodrun --min-np`, or hvdkit's own launcher) notices lost and new ranks. A rank then shuts
Horovod down, initializes it again, and continues from a state that it has kept in memory.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, TypeVar

from hvdkit.checkpoint.snapshots import Checkpoint
from hvdkit.core.heartbeat import WAITING, Heartbeat, first_line, lost_a_peer
from hvdkit.core.seam import Adapter
from hvdkit.results.train import Recovery

T = TypeVar("T")


def active() -> bool:
    """Whether an elastic launcher started this rank."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


# The sockets that Horovod has opened to its peers, by their names in /proc. There is one Horovod per process.
_peer_sockets: set[str] = set()


@contextlib.contextmanager
def recording_peer_sockets() -> Iterator[None]:
    """Record the sockets opened in the block as connections to the other ranks."""
    before = set(_sockets().values())
    try:
        yield
    finally:  # a failed start may have connected to some ranks
        _peer_sockets.clear()
        _peer_sockets.update(set(_sockets().values()) - before)


def close_peer_sockets() -> None:
    """Shut down the sockets to the other ranks, so that they notice that this rank has left Horovod.

    Horovod 0.28.1 keeps the sockets of its process sets open until it is initialized again (their GlooContext is not
    `enabled_`, so its Finalize does nothing): a rank that waits for this one would wait for Gloo's timeout of 30 s.
    """
    for descriptor, name in _sockets().items():
        if name in _peer_sockets:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                connection.getpeername()  # raises for a listening socket
                connection.shutdown(socket.SHUT_RDWR)  # Gloo still closes the descriptor
    _peer_sockets.clear()


def _sockets() -> dict[int, str]:
    """The names of this process's sockets by descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                found[int(entry.name)] = name
    return found


class HostsChanged(Exception):
    """Hosts were added or removed; all ranks shut Horovod down and initialize it again."""


class Commits:
    """The last state that this rank keeps in memory, and the recoveries so far.

    `look` raises HostsChanged, on all ranks, if hosts were added or removed.
    """

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self.held: Checkpoint | None = None
        self.recoveries: list[Recovery] = []
        self._look = look
        self._np = 0
        self._since: tuple[float, Literal["lost", "hosts"], int] | None = None

    def take(self, checkpoint: Checkpoint) -> None:
        """Keep this state in place of the previous one; raises HostsChanged as `look` does."""
        self.held = checkpoint
        self._look()

    def interrupted(self, why: Literal["lost", "hosts"]) -> None:
        """Record that an attempt ended before training did."""
        self._since = self._since or (time.monotonic(), why, self._np)

    def stepped(self, step: int, np: int) -> None:
        """Record that update `step` was made with `np` ranks; the first one after an interruption ends the recovery."""
        self._np = np
        if self._since is not None:
            began, why, before = self._since
            seconds = round(time.monotonic() - began, 3)
            self.recoveries.append(Recovery(why=why, step=step, np_before=before, np=np, seconds=seconds))
            self._since = None


def run_until_done(adapter: Adapter, attempt: Callable[[Commits], T], heartbeat: Heartbeat) -> T:
    """Call `attempt`, again whenever ranks are lost or join, until it returns; returns its result.

    An attempt starts with `adapter.init`. Exceptions with another cause are raised to the caller.
    """
    hosts = adapter.watch_hosts()
    commits = Commits(hosts.look)
    why: Literal["lost", "hosts"]
    while True:
        try:
            return attempt(commits)
        except HostsChanged:
            why = "hosts"
        except Exception as error:
            if not lost_a_peer(error):
                raise
            why = "lost"
            print(f"another rank is gone: {first_line(error)}", flush=True)
        commits.interrupted(why)
        heartbeat.beat(WAITING)
        with contextlib.suppress(Exception):  # shutdown may fail because its peers are gone
            adapter.shutdown()
        close_peer_sockets()
        hosts.forget()
