"""Scheduling policies: when gradients are sent, how they are grouped into buckets, and what else overlaps.

A policy says what overlaps (three switches) and how gradients are put into buckets (one of the functions below, which
handles all cases at once). The first five are those of S. Shi et al. 2018 (arXiv 1805.03812, section IV).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import RequestError, nearest
from hvdkit.simulator.cluster import Algorithm
from hvdkit.simulator.piecewise_linear import Floats

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class GradientTimes:
    """Gradients in the order in which backward finishes them, and what the user can set, for many cases.

    `ready` is when each is finished, in seconds from the start of backward, shape (tensors, cases); `bytes` has shape
    (tensors,). `seconds(first, last)` is how long tensors `first` to `last` take to send together; `first` has an
    index for each case.

    The others have shape (cases,): `threshold` and `bucket` in bytes, times in seconds. `negotiation_s` is how long
    Horovod's ranks take to agree in a cycle. If `synchronous`, Horovod's loop waits for a collective to end before it
    starts the next cycle.
    """

    ready: Floats
    bytes: Floats
    seconds: Callable[[Any, int], Floats]
    threshold: Floats
    cycle_s: Floats
    bucket: Floats
    negotiation_s: Floats
    synchronous: Bools


class Buckets(NamedTuple):
    """`closes` says that a bucket ends with this tensor, shape (tensors, cases).

    `gates` is the earliest time at which it can be sent, in seconds from the start of backward; None if a bucket can be
    sent as soon as its gradients are ready.
    """

    closes: Bools
    gates: Floats | None = None


def single(gradients: GradientTimes) -> Buckets:
    """One bucket for each gradient."""
    return Buckets(np.ones(gradients.ready.shape, bool))


def grouped(gradients: GradientTimes) -> Buckets:
    """As many gradients as fit into the fusion buffer; a larger gradient is sent alone."""
    closes = np.zeros(gradients.ready.shape, bool)
    closes[-1] = True
    held = np.zeros(gradients.ready.shape[1])
    for i, size in enumerate(gradients.bytes):
        full = (held + size > gradients.threshold) & (held > 0)
        closes[i - 1] |= full
        held = np.where(full, 0.0, held) + size
    return Buckets(closes)


def filled(gradients: GradientTimes) -> Buckets:
    """PyTorch's DistributedDataParallel (Li et al. 2020): a bucket ends once it has reached its size.

    The first bucket ends at 1 MiB, or at the bucket size if that is smaller.
    """
    closes = np.zeros(gradients.ready.shape, bool)
    held = np.zeros(gradients.ready.shape[1])
    limit = np.minimum(gradients.bucket, 2.0**20)
    for i, size in enumerate(gradients.bytes):
        held = held + size
        closes[i] = held >= limit
        limit = np.where(closes[i], gradients.bucket, limit)
        held = np.where(closes[i], 0.0, held)
    closes[-1] = True
    return Buckets(closes)


def merged(gradients: GradientTimes) -> Buckets:
    """MG-WFBP (Shi et al. 2019, arXiv 1811.11141): the buckets with which communication ends earliest.

    The paper's rule is optimal for a cost of one latency and one rate. This dynamic program is optimal for any cost:
    for a bucket that ends with gradient i, it tries all gradients as the bucket's first.
    """
    count, cases = gradients.ready.shape
    closes, ends = np.zeros((count, cases), bool), np.zeros((count + 1, cases))
    begins = np.zeros((count, cases), int)
    for i in range(count):
        firsts = np.broadcast_to(np.arange(i + 1)[:, None], (i + 1, cases))
        ends_from = np.maximum(ends[: i + 1], gradients.ready[i]) + gradients.seconds(firsts, i)
        begins[i] = ends_from.argmin(axis=0)
        ends[i + 1] = ends_from.min(axis=0)
    last = np.full(cases, count - 1)
    while (last >= 0).any():
        here = np.flatnonzero(last >= 0)
        closes[last[here], here] = True
        last[here] = begins[last[here], here] - 1
    return Buckets(closes)


def cycles(gradients: GradientTimes) -> Buckets:
    """Horovod (Sergeev and Del Balso 2018): a loop fuses, in each cycle, the gradients that are ready on all ranks.

    The first gradient waits for half a cycle on average. A fusion buffer holds `threshold` bytes.
    """
    count, cases = gradients.ready.shape
    closes, gates = np.zeros((count, cases), bool), np.zeros((count, cases))
    tick = gradients.ready[0] + gradients.cycle_s / 2
    free, held, first = np.zeros(cases), np.zeros(cases), np.zeros(cases, int)
    period = np.maximum(gradients.cycle_s, 1e-9)
    for i, size in enumerate(gradients.bytes):
        late = gradients.ready[i] > tick
        closed = (late | (held + size > gradients.threshold)) & (held > 0)
        if i and closed.any():
            closes[i - 1] = closed
            end = np.maximum(free, gates[i - 1]) + gradients.seconds(first, i - 1)
            free = np.where(closed, end, free)
            first, held = np.where(closed, i, first), np.where(closed, 0.0, held)
        if late.any():
            again = np.maximum(tick + gradients.negotiation_s, np.where(gradients.synchronous, free, 0.0))
            again = np.maximum(again, tick + gradients.cycle_s)
            idle = np.ceil(np.maximum(0.0, gradients.ready[i] - again) / period)
            tick = np.where(late, np.maximum(again + idle * period, gradients.ready[i]), tick)
        held = held + size
        gates[i] = tick + gradients.negotiation_s
    closes[-1] = True
    return Buckets(closes, gates)


@dataclass(frozen=True)
class Policy:
    """What overlaps, and how gradients are put into buckets.

    `reads_ahead`: batches are read and decoded while the device computes. `copies_ahead`: they are also copied to the
    device meanwhile. `overlaps`: gradients are sent during backward. `fuses`: buckets are copied into a buffer, and
    with `copies_back` out of it. `algorithm` is the allreduce's, None for the library's choice. `in_turn`: one bucket
    is sent after the other even where several streams could send at once, since the buckets were chosen for that.
    `by_layer`: gradients are sent in pieces, first layer first, and the next forward begins under way (`priority.py`).
    """

    reads_ahead: bool
    copies_ahead: bool
    overlaps: bool
    buckets: Callable[[GradientTimes], Buckets]
    fuses: bool = False
    copies_back: bool = True
    algorithm: Algorithm | None = None
    in_turn: bool = False
    by_layer: bool = False


POLICIES: dict[str, Policy] = {
    "naive": Policy(False, False, False, single),  # the step is the sum of all its parts
    "caffe-mpi": Policy(True, True, True, single),
    "cntk": Policy(True, False, False, single),
    "mxnet": Policy(True, False, True, single),
    "tensorflow": Policy(True, False, True, single),
    "mg-wfbp": Policy(True, True, True, merged, in_turn=True),
    "priority": Policy(True, True, True, single, in_turn=True, by_layer=True),
    "horovod": Policy(True, True, True, cycles, fuses=True),
    "ddp": Policy(True, True, True, filled, fuses=True),
    "grouped": Policy(True, True, False, grouped, fuses=True),  # hvdkit on CPUs
    "central": Policy(True, True, True, single, algorithm="central"),  # a parameter server
}


def named(name: str) -> Policy:
    """The policy with this name. Raises RequestError for an unknown one."""
    if name not in POLICIES:
        raise RequestError(f"policy: expected one of {', '.join(POLICIES)}, got {name!r}{nearest(name, POLICIES)}")
    return POLICIES[name]
