"""Elastic training: attempts, one after another, each with the ranks that Horovod's rendezvous has at that time.

hvdkit's elastic driver notices lost and new ranks. A rank then shuts Horovod down, initializes it again, and continues
from a state that it has kept in memory.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import pickle
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from hvdkit.checkpoint.snapshots import Checkpoint
from hvdkit.core.group import Group
from hvdkit.core.seam import Adapter
from hvdkit.errors import RunError, Stopped
from hvdkit.heartbeat import WAITING, Heartbeat, first_line, lost_a_peer
from hvdkit.rendezvous import ask
from hvdkit.results.train import Recovery

T = TypeVar("T")
ANSWER_S = 60.0  # for the driver to answer: it is busy where there are thousands of ranks
NOTICE_S = 1.0  # for a rank to notice a loss by its connections before they are closed
AGAIN = 75  # the exit status of a rank that could not connect (launch/launchers/elastic_rounds.py)
_HEAD = struct.Struct("<Q")
# What is known of a round under Horovod's own driver, as of plain `horovodrun`: ranks outlive a loss there too.
_OTHER: dict[str, Any] = {"numbers": {}, "fresh": False, "recoveries": [], "interrupted": None, "kept": {}}


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
    names = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(entry.readlink())
            if name.startswith("socket:"):
                names[int(entry.name)] = name
    return names


class HostsChanged(Exception):
    """Hosts were added or removed; all ranks shut Horovod down and initialize it again."""


class DriverLine:
    """This rank's line to the elastic driver (launch/launchers/elastic_driver.py), which starts ranks and forms rounds:
    groups of ranks that train together until one is lost or hosts change.

    Raises RunError where the driver does not answer any more.
    """

    def __init__(self) -> None:
        self._at = os.environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(os.environ["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        self._key = f"{os.environ['HOROVOD_HOSTNAME']}:{os.environ['HOROVOD_LOCAL_RANK']}"
        self._round = 0
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
        self._round = told["round"]
        threading.Thread(target=self._follow, args=(self._round,), daemon=True).start()
        return told

    def leave(self) -> None:
        """This rank leaves its round."""
        self._round = 0

    def connected(self) -> None:
        """Horovod is initialized."""
        self._connected = True
        self._ask("PUT", f"connected/{self._key}")

    def trained(self, **what: object) -> None:
        """Say for all ranks of the round that it has made its first update (`recovery`) or its first commit."""
        self._ask("PUT", f"trained/{self._round}", json.dumps(what))

    def _follow(self, number: int) -> None:
        """Wait for the end of a round. A rank that is lost while others connect leaves them waiting inside Horovod."""
        end: dict[str, Any] = {}
        while not end:
            try:
                end = self._ask("GET", f"round/{number}") or {}
            except RunError:  # the driver is gone, and ends this rank
                return
            if self._round != number:
                return
        if end["over"] == "hosts" and self._connected:
            self.changed = True
        elif self._connected:
            time.sleep(NOTICE_S)
            if self._round == number:  # it waits for the lost one, whose host may have gone without a word
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


class Kept:
    """The newest commit where ranks that start find it if all others are lost at once: in two files in turn, which lie
    in the driver's memory. `files` gives their names by path: on another host another process may have that path."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._paths = []
        with contextlib.suppress(OSError):
            self._paths = [path for path, name in files.items() if f"memfd:{name} " in os.readlink(path)]  # noqa: PTH115

    def write(self, checkpoint: Checkpoint) -> None:
        """Keep this one in place of the older of two."""
        if not self._paths:
            return
        with contextlib.suppress(OSError):
            numbers = [self._number(path) for path in self._paths]
            oldest = numbers.index(min(numbers))
            with open(self._paths[oldest], "r+b", buffering=0) as file:  # noqa: PTH123 - unbuffered: nothing is copied
                file.write(_HEAD.pack(0))  # not whole until it is
                pickle.dump(checkpoint, file, protocol=5)
                file.truncate()
                file.seek(0)
                file.write(_HEAD.pack(max(numbers) + 1))

    def read(self) -> Checkpoint | None:
        """The newest; None where there is none."""
        with contextlib.suppress(OSError):
            number, newest = max([(self._number(path), path) for path in self._paths], default=(0, ""))
            if number:
                with Path(newest).open("rb") as file:
                    file.seek(_HEAD.size)
                    checkpoint: Checkpoint = pickle.load(file)  # of this run's own ranks, in its driver's memory
                    return checkpoint
        return None

    @staticmethod
    def _number(path: str) -> int:
        with Path(path).open("rb") as file:
            head = file.read(_HEAD.size)
        return int(_HEAD.unpack(head)[0]) if len(head) == _HEAD.size else 0


class Commits:
    """The last state that this rank keeps in memory, and the recoveries so far.

    `look` says whether hosts were added or removed, the same on all ranks of a group; it is collective.
    """

    def __init__(self, driver: DriverLine | None = None, look: Callable[[Group], bool] = lambda world: False) -> None:
        self.held: Checkpoint | None = None
        self.recoveries: list[Recovery] = []
        self._driver, self._look = driver, look
        self._kept: Kept | None = None
        self._leads = False
        self._np = 0
        self._said: set[str] = set()  # of this round, to the driver
        self._since: tuple[float, Literal["lost", "hosts"], int] | None = None

    def begin(self, told: dict[str, Any]) -> None:
        """Begin a round, of which the driver says this (`DriverLine.join`)."""
        if not told["numbers"]:
            if self._np:
                self._since = self._since or (time.monotonic(), "lost", self._np)
            return
        self._leads, self._said = told["numbers"]["rank"] == 0, set()
        self.recoveries = [Recovery(**recovery) for recovery in told["recoveries"]]
        before = told["interrupted"]
        self._since = before and (time.monotonic() - before["ago_s"], before["why"], before["np"])
        self._kept = Kept(told["kept"]) if self._leads else None
        if self._kept and told["fresh"] and self.held is None:
            self.held = self._kept.read()

    def connected(self) -> None:
        """Horovod is initialized."""
        if self._driver:
            self._driver.connected()

    def take(self, checkpoint: Checkpoint, world: Group) -> None:
        """Keep this state in place of the previous one; raises HostsChanged as `look` tells. Collective."""
        self.held = checkpoint
        if self._kept:
            self._kept.write(checkpoint)
        self._say("committed", True)
        if self._look(world):
            raise HostsChanged

    def stepped(self, step: int, np: int) -> None:
        """Record that update `step` was made with `np` ranks; the first one after an interruption ends the recovery."""
        recovery, self._np = None, np
        if self._since is not None:
            began, why, before = self._since
            seconds = round(time.monotonic() - began, 3)
            recovery = Recovery(why=why, step=step, np_before=before, np=np, seconds=seconds)
            self.recoveries.append(recovery)
            self._since = None
        self._say("recovery", recovery and recovery.model_dump())

    def _say(self, what: str, value: object) -> None:
        if self._driver and self._leads and what not in self._said:
            self._said.add(what)
            self._driver.trained(**{what: value})


def run_until_done(adapter: Adapter, attempt: Callable[[Commits], T], heartbeat: Heartbeat) -> T:
    """Call `attempt`, again whenever ranks are lost or join, until it returns; returns its result.

    An attempt starts with `adapter.init`. Exceptions with another cause are raised to the caller.
    """
    driver = DriverLine()
    commits = Commits(driver, lambda world: bool(adapter.allgather_object(driver.changed, world, name="hosts")[0]))
    while True:
        heartbeat.beat(WAITING)
        commits.begin(driver.join())
        heartbeat.beat("connecting to the other ranks")
        try:
            return attempt(commits)
        except HostsChanged:
            print("hosts have changed", flush=True)
        except Exception as error:
            if not lost_a_peer(error):
                raise
            print(f"another rank is gone: {first_line(error)}", flush=True)
        heartbeat.beat("leaving the other ranks")
        with contextlib.suppress(Exception):  # shutdown may fail because its peers are gone
            adapter.shutdown()
        driver.leave()
        close_peer_sockets()
