"""A rank's line to the elastic driver, and its sockets to the other ranks.

Standard library only, and no syntax newer than Python 3.8: launched programs use it under the user's interpreter.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hvdkit.errors import RunError, Stopped
from hvdkit.rendezvous import ask

ANSWER_S = 60.0  # for the driver to answer: it is busy where there are thousands of ranks
NOTICE_S = 1.0  # for a rank to notice a loss by its connections before they are closed
AGAIN = 75  # the exit status of a rank that could not connect (launch/launchers/elastic_rounds.py)
# What is known of a round under Horovod's own driver, as of plain `horovodrun`: ranks outlive a loss there too.
_OTHER: dict[str, Any] = {"numbers": {}, "fresh": False, "recoveries": [], "interrupted": None, "kept": {}}

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
    names = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                names[int(entry.name)] = name
    return names


class DriverLine:
    """This rank's line to the elastic driver (launch/launchers/elastic_driver.py), which starts ranks and forms rounds:
    groups of ranks that train together until one is lost or hosts change. `on_change` is called each second once hosts
    have changed, until the round is over.

    Raises RunError where the driver does not answer any more.
    """

    def __init__(self, on_change: Callable[[], object] = lambda: None) -> None:
        self._on_change = on_change
        self._at = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        self._key = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
        self.round = 0
        self._connected = False
        self.changed = False  # whether hosts have, in this round

    def join(self) -> dict[str, Any]:
        """Wait for the next round and take this rank's numbers from it; returns what the driver says of it.

        Raises Stopped where this rank's host has been taken away.
        """
        self._connected, self.changed = False, False
        told: dict[str, Any] = {}
        while not told:
            answer = self._ask("GET", f"join/{self._key}")
            told = _OTHER if answer is None else answer
        if told is _OTHER:
            return _OTHER
        if told.get("leaves"):
            raise Stopped("this rank has been removed from elastic job: its host is not there any more")
        os.environ.update({f"HOROVOD_{name.upper()}": str(value) for name, value in told["numbers"].items()})
        self.round = told["round"]
        threading.Thread(target=self._follow, args=(self.round,), daemon=True).start()
        return told

    def leave(self) -> None:
        """This rank leaves its round."""
        self.round = 0

    def connected(self) -> None:
        """Horovod is initialized."""
        self._connected = True
        self._ask("PUT", f"connected/{self._key}")

    def trained(self, **what: object) -> None:
        """Say for all ranks of the round that it has made its first update (`recovery`) or its first commit."""
        self._ask("PUT", f"trained/{self.round}", json.dumps(what))

    def _follow(self, number: int) -> None:
        """Wait for the end of a round. A rank that is lost while others connect leaves them waiting inside Horovod."""
        over = None
        while over in (None, "hosts"):
            try:
                over = (self._ask("GET", f"round/{number}") or {}).get("over")
            except RunError:  # the driver is gone, and ends this rank
                return
            if self.round != number:
                return
            if over == "hosts":
                self.changed = True
                self._on_change()
                time.sleep(NOTICE_S)
        if self._connected:
            time.sleep(NOTICE_S)
            if self.round == number:  # it waits for the lost one, whose host may have gone without a word
                close_peer_sockets()
        else:
            print("another rank is gone while ranks connect: this one starts again", flush=True)
            os._exit(AGAIN)

    def _ask(self, method: str, path: str, body: str | None = None) -> dict[str, Any] | None:
        """The answer; None where the driver knows of no such thing."""
        try:
            said = ask(*self._at, method, f"/{path}", (body or "").encode(), ANSWER_S)
            if said is None:
                return None
            answer: dict[str, Any] = json.loads(said or b"{}")
            if not isinstance(answer, dict):
                raise ValueError("expected an object of JSON")
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise RunError(f"the elastic driver does not answer any more: {error}; see logs/") from error
        return answer
