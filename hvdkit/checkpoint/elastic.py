"""Training that outlives its ranks: one attempt after another, each with the ranks that Horovod's rendezvous has then.

Horovod's elastic driver (`horovodrun --min-np`, or hvdkit's own launcher) notices lost and new ranks. What it needs of
a rank is to leave Horovod and enter it again, and to have kept a state that all ranks can go on from.
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
    """Whether an elastic launcher has started this rank."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


# Horovod is one a process, and so are the sockets that it has opened to its peers: as /proc calls them.
_lines: set[str] = set()


@contextlib.contextmanager
def noting_lines() -> Iterator[None]:
    """What is opened inside are the lines to the other ranks."""
    before = set(_sockets().values())
    try:
        yield
    finally:  # what could not meet all has met some
        _lines.clear()
        _lines.update(set(_sockets().values()) - before)


def hang_up() -> None:
    """Let the other ranks see that this one has left Horovod.

    Horovod 0.28.1 keeps the sockets of its process sets until it is entered again (their GlooContext is not `enabled_`,
    so its Finalize does nothing): a rank that waits for this one would wait for Gloo's timeout of 30 s.
    """
    for descriptor, name in _sockets().items():
        if name in _lines:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as line:
                line.getpeername()  # raises where it listens
                line.shutdown(socket.SHUT_RDWR)  # the descriptor stays Gloo's to close
    _lines.clear()


def _sockets() -> dict[int, str]:
    """This process's sockets by their descriptor."""
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                found[int(entry.name)] = name
    return found


class HostsChanged(Exception):
    """Hosts have come or gone, and all ranks leave Horovod to enter it again."""


class Commits:
    """The last state that this rank has kept in memory, and what was recovered from so far.

    `look` says whether hosts have come or gone: it raises HostsChanged, on all ranks alike.
    """

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self.held: Checkpoint | None = None
        self.recoveries: list[Recovery] = []
        self._look = look
        self._np = 0
        self._since: tuple[float, Literal["lost", "hosts"], int] | None = None

    def take(self, checkpoint: Checkpoint) -> None:
        """Keep this state instead of the one before."""
        self.held = checkpoint
        self._look()

    def interrupted(self, why: Literal["lost", "hosts"]) -> None:
        """An attempt has come to its end before training has."""
        self._since = self._since or (time.monotonic(), why, self._np)

    def stepped(self, step: int, np: int) -> None:
        """An update is done, `step` in all, with `np` ranks."""
        self._np = np
        if self._since is not None:
            began, why, before = self._since
            seconds = round(time.monotonic() - began, 3)
            self.recoveries.append(Recovery(why=why, step=step, np_before=before, np=np, seconds=seconds))
            self._since = None


def persist(adapter: Adapter, attempt: Callable[[Commits], T], heartbeat: Heartbeat) -> T:
    """Call `attempt` until it comes to its end, again whenever ranks are lost or join; returns what it returns.

    An attempt begins with `adapter.init`. What it raises for another reason passes.
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
        with contextlib.suppress(Exception):  # it has lost its peers, and may say so
            adapter.shutdown()
        hang_up()
        hosts.forget()
