"""When gradients may go, in which company, and what else overlaps: one entry for each way that frameworks have.

A policy is what overlaps (three switches) and how gradients are put into buckets (one of the functions below, for all
what-ifs at once). The first five are those that S. Shi et al. 2018 (arXiv 1805.03812, section IV) tell apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.errors import RequestError, nearest
from hvdkit.simulator.cluster import Algorithm
from hvdkit.simulator.lines import Floats

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Options:
    """What may be set, for each what-if (arrays of one length). Seconds and bytes.

    `negotiation_s` is what Horovod's ranks need to agree in a cycle; with `synchronous` its loop waits for a collective
    to end before it looks again.
    """

    threshold: Floats
    cycle_s: Floats
    bucket: Floats
    negotiation_s: Floats
    synchronous: Bools


@dataclass(frozen=True)
class Gradients:
    """As backward finishes them: `ready` seconds after its begin, shape (tensors, what-ifs), `bytes` (tensors,).

    `seconds(first, last)` is what tensors `first` to `last` (arrays, one for each what-if) take together on the wire.
    """

    ready: Floats
    bytes: Floats
    seconds: Callable[[Any, int], Floats]


@dataclass(frozen=True)
class Buckets:
    """`closes`: a bucket ends with this tensor, shape (tensors, what-ifs). `gates`: it may not go before, in seconds
    after backward's begin; None where nothing but its gradients holds it up."""

    closes: Bools
    gates: Floats | None = None


def whole(gradients: Gradients, options: Options) -> Buckets:
    """All gradients in one."""
    closes = np.zeros(gradients.ready.shape, bool)
    closes[-1] = True
    return Buckets(closes)


def each(gradients: Gradients, options: Options) -> Buckets:
    """Every gradient by itself."""
    return Buckets(np.ones(gradients.ready.shape, bool))


def grouped(gradients: Gradients, options: Options) -> Buckets:
    """As many as fit into a fusion buffer; a larger one goes by itself."""
    closes = np.zeros(gradients.ready.shape, bool)
    closes[-1] = True
    held = np.zeros(gradients.ready.shape[1])
    for i, size in enumerate(gradients.bytes):
        full = (held + size > options.threshold) & (held > 0)
        closes[i - 1] |= full
        held = np.where(full, 0.0, held) + size
    return Buckets(closes)


def filled(gradients: Gradients, options: Options) -> Buckets:
    """PyTorch's DistributedDataParallel (Li et al. 2020): a bucket ends when it has its size; the first has 1 MiB."""
    closes = np.zeros(gradients.ready.shape, bool)
    held = np.zeros(gradients.ready.shape[1])
    limit = np.minimum(options.bucket, 2.0**20)
    for i, size in enumerate(gradients.bytes):
        held = held + size
        closes[i] = held >= limit
        limit = np.where(closes[i], options.bucket, limit)
        held = np.where(closes[i], 0.0, held)
    closes[-1] = True
    return Buckets(closes)


def merged(gradients: Gradients, options: Options) -> Buckets:
    """MG-WFBP (Shi et al. 2019, arXiv 1811.11141): the buckets that end first, whatever they have to wait for.

    The paper merges by a rule that is optimal for costs of one latency and one rate but for what ties leave. Here it is
    the optimum for any costs: the earliest end with a bucket closed at each gradient, out of all places to begin it.
    """
    count, cases = gradients.ready.shape
    closes, ends = np.zeros((count, cases), bool), np.zeros((count + 1, cases))
    begins = np.zeros((count, cases), int)
    for i in range(count):
        firsts = np.broadcast_to(np.arange(i + 1)[:, None], (i + 1, cases))
        each = np.maximum(ends[: i + 1], gradients.ready[i]) + gradients.seconds(firsts, i)
        begins[i] = each.argmin(axis=0)
        ends[i + 1] = each.min(axis=0)
    last = np.full(cases, count - 1)
    while (last >= 0).any():
        here = np.flatnonzero(last >= 0)
        closes[last[here], here] = True
        last[here] = begins[last[here], here] - 1
    return Buckets(closes)


def cycles(gradients: Gradients, options: Options) -> Buckets:
    """Horovod (Sergeev and Del Balso 2018): a loop looks each cycle at what all ranks have ready, and fuses that.

    On average the first gradient waits for half a cycle. What the ranks agree on goes in buffers of the threshold.
    """
    count, cases = gradients.ready.shape
    closes, gates = np.zeros((count, cases), bool), np.zeros((count, cases))
    tick = gradients.ready[0] + options.cycle_s / 2
    free, held, first = np.zeros(cases), np.zeros(cases), np.zeros(cases, int)
    period = np.maximum(options.cycle_s, 1e-9)
    for i, size in enumerate(gradients.bytes):
        late = gradients.ready[i] > tick
        closed = (late | (held + size > options.threshold)) & (held > 0)
        if i and closed.any():
            closes[i - 1] = closed
            end = np.maximum(free, gates[i - 1]) + gradients.seconds(first, i - 1)
            free = np.where(closed, end, free)
            first, held = np.where(closed, i, first), np.where(closed, 0.0, held)
        if late.any():
            again = np.maximum(tick + options.negotiation_s, np.where(options.synchronous, free, 0.0))
            again = np.maximum(again, tick + options.cycle_s)
            idle = np.ceil(np.maximum(0.0, gradients.ready[i] - again) / period)
            tick = np.where(late, np.maximum(again + idle * period, gradients.ready[i]), tick)
        held = held + size
        gates[i] = tick + options.negotiation_s
    closes[-1] = True
    return Buckets(closes, gates)


@dataclass(frozen=True)
class Policy:
    """`reads_ahead`: batches are read and decoded beside the device. `copies_ahead`: they are brought to it as well.
    `overlaps`: gradients go during backward. `fuses`: buckets are copied into a buffer and back."""

    told: str
    reads_ahead: bool
    copies_ahead: bool
    overlaps: bool
    buckets: Callable[[Gradients, Options], Buckets]
    fuses: bool = False
    algorithm: Algorithm | None = None


POLICIES: dict[str, Policy] = {
    "naive": Policy("nothing overlaps: the sum of all parts", False, False, False, each),
    "caffe-mpi": Policy("input, copies and communication overlap, layer by layer", True, True, True, each),
    "cntk": Policy("input overlaps; communication begins behind backward", True, False, False, each),
    "mxnet": Policy(
        "input and communication overlap, layer by layer; copies to the device do not", True, False, True, each
    ),
    "tensorflow": Policy(
        "input and communication overlap, layer by layer; copies to the device do not", True, False, True, each
    ),
    "mg-wfbp": Policy("as caffe-mpi, with gradients merged where that saves latency", True, True, True, merged),
    "horovod": Policy("a loop fuses what is ready each cycle", True, True, True, cycles, fuses=True),
    "ddp": Policy("buckets of a fixed size, in the order of backward", True, True, True, filled, fuses=True),
    "grouped": Policy(
        "all gradients behind backward, in fusion buffers: hvdkit on CPUs", True, True, False, grouped, fuses=True
    ),
    "central": Policy("one server adds up, layer by layer", True, True, True, each, algorithm="central"),
}  # fmt: skip


def named(name: str) -> Policy:
    """The policy of a name. Raises RequestError for one that is not known."""
    if name not in POLICIES:
        raise RequestError(f"policy: expected one of {', '.join(POLICIES)}, got {name!r}{nearest(name, POLICIES)}")
    return POLICIES[name]
