"""When this rank came to what in a step, while somebody records (`hvdkit profile`); else a mark costs next to nothing.

In a step they come in this order; those of a batch again for each batch of an update:

| mark      | what is done by then                                                            |
|-----------|---------------------------------------------------------------------------------|
| OPEN      | nothing: the step before has ended                                              |
| STEP      | the batch is at hand                                                            |
| BEGIN     | the framework has begun with a batch                                            |
| INPUTS    | the batch is on the device                                                      |
| FORWARD   | logits or loss are there                                                        |
| BACKWARD  | all gradients of the batch are there                                            |
| SENT      | they are compressed and handed to Horovod; those sent during backward too       |
| RECEIVED  | Horovod has given them all back                                                 |
| REDUCED   | they are decompressed: averages over all ranks                                  |
| UPDATED   | the weights are new                                                             |
| END       | the device has nothing left to do                                               |

Between BACKWARD and REDUCED there may be several pairs of SENT and RECEIVED, one behind the other.
`READY` is a mark for each gradient as backward finishes it, `LAYER` one for each layer as its forward pass ends. `PUT`
comes with each collective that core asks for, with its kind, the bytes that this rank puts in, and those that the
busiest link between hosts (of one host: between ranks) carries one way. Where ranks average their weights, SENT,
RECEIVED and REDUCED come behind UPDATED.
"""

from __future__ import annotations

from time import perf_counter_ns

OPEN, STEP, BEGIN, INPUTS, FORWARD, BACKWARD = "open", "step", "begin", "inputs", "forward", "backward"
SENT, RECEIVED, REDUCED, UPDATED, END = "sent", "received", "reduced", "updated", "end"
READY, LAYER, PUT = "ready:", "layer:", "put:"  # and a name; PUT's is such as allgather:4096:12288

Mark = tuple[str, int]  # and nanoseconds by this machine's monotonic clock

_found: list[Mark] = []
_on = False


def recording() -> bool:
    """Whether marks are kept."""
    return _on


def record(on: bool) -> None:
    """Keep marks from now on, or no longer; those that are there are forgotten."""
    global _on
    _found.clear()
    _on = on


def mark(name: str) -> None:
    """It is now."""
    if _on:
        _found.append((name, perf_counter_ns()))


def note(name: str, at: int) -> None:
    """It was at `at` nanoseconds, as `mark` counts them: for what is known later only, such as a device's clock."""
    if _on:
        _found.append((name, at))


def take() -> list[Mark]:
    """The marks since the last call, in the order of time."""
    taken = sorted(_found, key=lambda each: each[1])
    _found.clear()
    return taken
