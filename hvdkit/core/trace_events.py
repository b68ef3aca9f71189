"""Trace events of this rank's training step, kept only while `hvdkit profile` records them.

The events of a step come in this order; those of a batch are repeated for each batch of an update:

| event     | meaning                                                                         |
|-----------|---------------------------------------------------------------------------------|
| OPEN      | the previous step has ended                                                     |
| STEP      | the batch is loaded                                                             |
| BEGIN     | the framework has started with a batch                                          |
| INPUTS    | the batch is on the device                                                      |
| FORWARD   | logits or loss are computed                                                     |
| BACKWARD  | all gradients of the batch are computed                                         |
| SENT      | all gradients, also those sent during backward, are compressed and in Horovod   |
| RECEIVED  | Horovod has returned them all                                                   |
| REDUCED   | they are decompressed and averaged over the strategy's group                               |
| UPDATED   | the weights are updated                                                         |
| END       | the device has finished its work                                                |

Between BACKWARD and REDUCED there may be several pairs of SENT and RECEIVED, one after another.
A pipeline records an ACTION for each one of its schedule when it ends: it begins when the one before ends. DELIVERED
comes after the last one, when what this rank sends has come.

READY is recorded for each gradient when backward has computed it, LAYER for each layer when its forward pass ends. PUT
is recorded for each collective that core calls, with its kind, this rank's input bytes, and the bytes that the busiest
link between hosts (on one host: between ranks) carries in one direction. When ranks average their weights, SENT,
RECEIVED and REDUCED come after UPDATED.
"""

from __future__ import annotations

from time import perf_counter_ns

OPEN, STEP, BEGIN, INPUTS, FORWARD, BACKWARD = "open", "step", "begin", "inputs", "forward", "backward"
SENT, RECEIVED, REDUCED, UPDATED, END = "sent", "received", "reduced", "updated", "end"
READY, LAYER, PUT = "ready:", "layer:", "put:"  # a name follows; for PUT, for example, allgather:4096:12288
ACTION, DELIVERED = "action:", "delivered"  # for ACTION, for example, send activation:3:0 of microbatch 3, chunk 0

Mark = tuple[str, int]  # the name, and nanoseconds of this machine's monotonic clock

_found: list[Mark] = []
_on = False


def recording() -> bool:
    """Whether trace events are recorded."""
    return _on


def record(on: bool) -> None:
    """Start or stop recording trace events; events recorded so far are discarded."""
    global _on
    _found.clear()
    _on = on


def mark(name: str) -> None:
    """Record a trace event at the current time."""
    if _on:
        _found.append((name, perf_counter_ns()))


def note(name: str, at: int) -> None:
    """Record a trace event at `at` nanoseconds of the same clock, for times known only later, such as a device's."""
    if _on:
        _found.append((name, at))


def take() -> list[Mark]:
    """Return the trace events since the last call, sorted by time, and discard them."""
    taken = sorted(_found, key=lambda event: event[1])
    _found.clear()
    return taken
