"""Reports from a rank to its launcher: its progress, and why it failed. Without hvdkit's launcher there are none.

In the folder `HVDKIT_RANK_DIR` a rank writes `rank-<r>.beat` (its phase), `rank-<r>.stack` (on SIGUSR2, the stacks of
its threads) and `rank-<r>.failure.json`. `HVDKIT_TRACE` replaces the prefix `rank-<r>`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdkit.errors import HvdkitError
from hvdkit.files import open_standard_streams, write_atomic

BEAT_BYTES = 64
STOP = "stop"  # a file of this name in the folder asks all ranks to write a checkpoint and exit
# Phases that the launcher knows: Horovod has not started yet; a wait for other ranks that is not a hang; a wait for the
# disk, in which rank 0 beats and the others wait for it.
STARTING, WAITING, DISK = "starting", "waiting for ranks", "waiting for the disk"
NOTED = "HVDKIT_NOTED"  # in the environment of ranks if the command has said what `worker.unreached` says
DONE = "done"  # the last phase: all is written, and the process ends by its own decision
SAID = "hvdkit: "  # how lines begin that the launcher shows
_BEAT_S, _PATIENCE_S = 0.5, 5.0  # between two beats of a wait for the disk; such a wait that is worth a line

# Matches the output of a rank that fails only because another rank is gone.
LOST_A_PEER = re.compile(
    r"Horovod has been shut down|Connection (closed|reset) by peer|Connection refused|Broken pipe|"
    r"Application timeout caused pair closure|Timed out waiting|Wait timeout after|"
    r"(Read error|Read timeout|Write timeout|Socket closed|writev|connect) \[|"
    r"ncclSystemError|ncclRemoteError|remote process exited"
)
# Matches lines of Horovod, Gloo or NCCL. In any other line the broken connection may be an unrelated one.
SAID_BY_HOROVOD = re.compile(
    r"[Hh]orovod|[Gg]loo|nccl|\[[0-9A-Fa-f.:]+\]:\d+|Application timeout|Timed out waiting \d+ms"
)


def lost_a_peer(error: BaseException) -> bool:
    """Whether `error` means that another rank is gone, also if the framework wraps Horovod's own error.

    Horovod raises the same type when ranks disagree on a tensor's shape or dtype; that does not count as a lost rank.
    An error raised while Horovod's error is being handled counts as its consequence.
    """
    if LOST_A_PEER.search(str(error)):
        return True
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if any(kind.__name__ == "HorovodInternalError" for kind in type(cause).__mro__) and "ismatched" not in str(
            cause
        ):
            return True
        seen.add(id(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def say(line: str) -> None:
    """Print a line that the launcher shows at once. Without a standard output it is dropped."""
    with contextlib.suppress(OSError, ValueError):
        print(f"{SAID}{line}", flush=True)


# What has failed in an operation, of which the framework says later, and by another error, that it failed.
hidden: list[Exception] = []


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return str(error).partition("\n")[0] or type(error).__name__


class Heartbeat:
    """Reports one rank's progress to the launcher. A report that cannot be written is dropped."""

    def __init__(self) -> None:
        folder = os.environ.get("HVDKIT_RANK_DIR")
        self._rank = int(os.environ.get("HOROVOD_RANK", 0))
        self._pid = os.getpid()  # a process that the rank forks has a copy of this object, and reports nothing
        self._name = os.environ.get("HVDKIT_TRACE", f"rank-{self._rank}")
        self._folder = Path(folder) if folder else None
        self._step: int | None = None
        self.phase = STARTING
        self._beats = 0
        self._beat_file = -1
        self._catches = self._signalled = False
        if self._folder:
            # The launcher may run on another host, and the folder may not exist here.
            with contextlib.suppress(OSError):
                # faulthandler runs in C without the GIL, so it also works for a rank that is stuck in C code.
                beats, stacks = self._folder / f"{self._name}.beat", self._folder / f"{self._name}.stack"
                self._stack_file = stacks.open("w")
                faulthandler.register(signal.SIGUSR2, self._stack_file, all_threads=True)
                self._beat_file = os.open(beats, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self.beat(STARTING)

    @property
    def updates(self) -> int:
        """The number of finished updates that was reported last."""
        return self._step or 0

    def asked_to_stop(self) -> bool:
        """Whether the launcher asks training to write a checkpoint and exit; without one, whether SIGTERM arrived."""
        if self._folder is not None:
            return (self._folder / STOP).exists()
        if not self._catches:
            self._catches = True
            signal.signal(signal.SIGTERM, self._note_signal)
        return self._signalled

    def _note_signal(self, number: int, frame: object) -> None:
        self._signalled = True

    def beat(self, phase: str, step: int | None = None) -> None:
        """Report the rank's current phase; costs a few microseconds. `step` counts finished updates."""
        self._step = self._step if step is None else step
        self.phase = phase
        self._beats += 1
        if self._beat_file >= 0 and self._pid == os.getpid():
            open_standard_streams()  # a library or the user's code may have closed them
            line = f"{self._beats} {-1 if self._step is None else self._step} {phase}"
            with contextlib.suppress(OSError):
                os.pwrite(self._beat_file, line.encode().ljust(BEAT_BYTES), 0)

    def on_disk(self, what: str, work: Callable[..., object], *arguments: Any) -> None:
        """Call a function that writes to the disk, in a thread, and wait by `await_disk`. Raises what it does."""
        raised: list[BaseException] = []

        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, name="disk")
        thread.start()
        self.await_disk(thread, what, time.monotonic())
        if raised:
            raise raised[0]

    def await_disk(self, thread: threading.Thread, what: str, began: float) -> None:
        """Wait for a thread that has been writing `what` since `began` (`time.monotonic`), and say so if it takes long.

        The wait is no hang however long it takes: the kernel returns when the disk does.
        """
        phase, next_s = self.phase, _PATIENCE_S
        thread.join(_BEAT_S)
        while thread.is_alive():
            self.beat(DISK)
            seconds = time.monotonic() - began
            if seconds >= next_s:
                say(f"rank {self._rank} waits for the disk: {what} takes {seconds:.0f} s so far")
                next_s = 2 * seconds
            thread.join(_BEAT_S)
        if next_s > _PATIENCE_S:
            say(f"rank {self._rank} waits for the disk no more: {what} has taken {time.monotonic() - began:.0f} s")
        self.phase = phase

    def finished(self) -> None:
        """Report that the rank has done its work; without this an exit status of 0 counts as leaving early."""
        if self._folder is None or self._pid != os.getpid():
            return
        # Code of the user's own may have closed the descriptor, and opened another file under its number.
        with contextlib.suppress(OSError):
            self._beat_file = os.open(self._folder / f"{self._name}.beat", os.O_WRONLY | os.O_CLOEXEC)
        self.beat(DONE)

    def failed(self, kind: str, message: str) -> None:
        """Write the record of a failure.

        The launcher uses `kind` to find the rank at fault: `request` and `error` are faults of this rank,
        `communication` means that another rank failed first.
        """
        if self._folder is None or self._pid != os.getpid():
            return
        write_failure(self._folder, self._name, kind, message, self._step)


def write_failure(folder: Path, name: str, kind: str, message: str, step: int | None = None) -> None:
    """Write the record of this rank's failure into the folder, whose files of the rank begin with `name`."""
    host = os.environ.get("HOROVOD_HOSTNAME", socket.gethostname())
    who = {"rank": int(os.environ.get("HOROVOD_RANK", 0)), "host": host}
    when = {"time": time.time(), "clock": time.monotonic(), "step": step}  # the rank agent has the same clock
    failure = {**who, **when, "kind": kind, "message": message}
    try:
        write_atomic(folder / f"{name}.failure.json", json.dumps(failure))
    except HvdkitError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
