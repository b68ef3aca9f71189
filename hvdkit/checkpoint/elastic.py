"""Elastic training: attempts, one after another, each with the ranks that Horovod's rendezvous has at that time.

hvdkit's elastic driver notices lost and new ranks. A rank then shuts Horovod down, initializes it again, and continues
from a state that it has kept in memory.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from hvdkit.checkpoint.snapshots import Checkpoint
from hvdkit.core.group import Group
from hvdkit.core.seam import Adapter
from hvdkit.elastic_line import DriverLine, close_peer_sockets
from hvdkit.heartbeat import WAITING, Heartbeat, first_line, lost_a_peer
from hvdkit.results.train import Recovery

T = TypeVar("T")
_HEAD = struct.Struct("<Q")


def active() -> bool:
    """Whether an elastic launcher started this rank."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


class HostsChanged(Exception):
    """Hosts were added or removed; all ranks shut Horovod down and initialize it again."""


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
