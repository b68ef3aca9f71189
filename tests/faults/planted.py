"""Lets some ranks end as PLANTED says: `RANKS PHASE STEP HOW`, such as `0,1 input 5 raise`.

The fault comes where the rank reports a phase that begins so (hvdkit.heartbeat) for the first time from that step
on; `top` is at once. PHASE `stage` is where a stage of a divided model has computed what it sends to its neighbor,
`part` where a part of a layer has what is to be summed; in a compiled step that is where it is traced. HOW is a key of
WAYS, the name of a signal, `shape` (what is sent lacks a column), or `hvdkit` and a signal, which the process LAUNCHER
gets.
"""

import os
import re
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any


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


def starve() -> None:
    """Memory that the framework asks for and does not get."""
    has = int(re.findall(r"VmSize:\s*(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (has + 2**26, has + 2**26))
    if torch := sys.modules.get("torch"):
        torch.ones(2**28)
    elif tensorflow := sys.modules.get("tensorflow"):
        with tensorflow.init_scope():
            tensorflow.ones([2**28])
    else:
        sys.modules["mxnet"].nd.ones((2**28,)).wait_to_read()


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
    "starve": starve,
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

    beat, done, updates = heartbeat.Heartbeat.beat, [], [0]

    def planted(self: heartbeat.Heartbeat, now: str, at: int | None = None) -> None:
        beat(self, now, at)
        updates[0] = self.updates
        if now.startswith(phase) and self.updates >= int(step) and not done:
            done.append(True)
            act(how)

    heartbeat.Heartbeat.beat = planted

    def sent(tensor: Any) -> Any:
        """What is sent in the place of a tensor."""
        if updates[0] < int(step) or done:
            return tensor
        done.append(True)
        if how != "shape":
            act(how)
            return tensor
        return tensor[..., :-1] + 0

    if phase == "stage":
        from hvdkit.core.pipeline import Pipeline

        send = Pipeline._send
        Pipeline._send = lambda self, pair, tensor, *of: send(self, pair, sent(tensor), *of)
    elif phase == "part":
        from hvdkit.adapters.collectives import HorovodAdapter

        allreduce = HorovodAdapter.allreduce

        def reduced(self: Any, tensors: list[Any], group: Any, op: str = "average", name: str = "", **more: Any) -> Any:
            given = [sent(tensor) for tensor in tensors] if name.startswith("tensor.") and op == "sum" else tensors
            return allreduce(self, given, group, op, name, **more)

        HorovodAdapter.allreduce = reduced
