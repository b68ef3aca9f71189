"""Lets some ranks end as PLANTED says: `RANKS PHASE STEP HOW`, such as `0,1 input 5 raise`.

The fault comes where the rank reports a phase that begins so (hvdkit.heartbeat) for the first time from that step
on; `top` is at once. HOW is a key of WAYS, the name of a signal, or `hvdkit` and a signal, which the process LAUNCHER
gets.
"""

import os
import signal
import sys
import time


def fork() -> None:
    """A child that leaves the training loop by itself, and one that outlives the rank."""
    for way in (lambda: sys.exit(0), lambda: signal.pause()):
        if os.fork() == 0:
            way()


def fail() -> None:
    raise ValueError("the seventh\x1b]0;stolen\x07 image is \u202eupside down\nand more")


def interrupt() -> None:
    raise KeyboardInterrupt


def exhaust() -> None:
    raise MemoryError("Unable to allocate 8.00 PiB for an array")


def speak() -> None:
    os.write(1, b"\x1b]0;stolen\x07\x1b[2J\xc2\x9b31m\xe2\x80\xae last words\n")
    os._exit(3)


WAYS = {
    "sys.exit(0)": lambda: sys.exit(0),
    "sys.exit(3)": lambda: sys.exit(3),
    "sys.exit(text)": lambda: sys.exit("nothing left to learn"),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    "raise": fail,
    "interrupt": interrupt,
    "memory": exhaust,
    "speak": speak,
    "close": lambda: [os.close(number) for number in (0, 1, 2)],
    "fork": fork,
}


def act(how: str) -> None:
    """End so."""
    if how in WAYS:
        WAYS[how]()
    elif how.startswith("hvdkit "):
        os.kill(int(os.environ["LAUNCHER"]), signal.Signals[how.removeprefix("hvdkit ")])
        time.sleep(1)  # so that training is not done before hvdkit has seen it
    else:
        signal.raise_signal(signal.Signals[how])


def plant(fault: str) -> None:
    """Let this rank end so, if it is one of those that the fault names."""
    ranks, phase, step, how = fault.split(" ", 3)
    if os.environ.get("HOROVOD_RANK", "0") not in ranks.split(","):
        return
    if phase == "top":
        act(how)
        return
    from hvdkit import heartbeat

    beat, done = heartbeat.Heartbeat.beat, []

    def planted(self: heartbeat.Heartbeat, now: str, at: int | None = None) -> None:
        beat(self, now, at)
        if now.startswith(phase) and self.updates >= int(step) and not done:
            done.append(True)
            act(how)

    heartbeat.Heartbeat.beat = planted
