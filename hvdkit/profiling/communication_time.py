"""How long collectives took, within steps and by themselves, and their bandwidth compared to the link's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from hvdkit.core import trace_events
from hvdkit.profiling.breakdown import FORWARD, TracedStep, spread
from hvdkit.profiling.timeline import Operation
from hvdkit.results.bus import sent_bytes
from hvdkit.results.profile import Communication, Latency, Link
from hvdkit.results.recording import RankRecord

Clock = Callable[[int], int]


def of_step(steps: Sequence[TracedStep], ranks: int, lanes: int = 0) -> list[Communication]:
    """The collectives of a step: medians over those of rank 0's `steps` that have the most usual number of them."""
    counts = Counter(len(step.operations) for step in steps if step.operations)
    if not counts:
        return []
    usual = max(counts, key=lambda count: (counts[count], count))
    rows = [(step, step.operations) for step in steps if len(step.operations) == usual]
    communications = []
    for number in range(usual):
        mine = [operations[number] for _, operations in rows]
        carried = mine[0].link_bytes
        starts = [operations[number].start - step.last(FORWARD).end for step, operations in rows]
        communications.append(
            Communication(
                operation=mine[0].operation,
                tensors=len(mine[0].names),
                bytes=mine[0].bytes,
                start_ms=float(np.median(starts)) / 1e6,
                ms=float(np.median([op.end - op.start for op in mine])) / 1e6,
                link_bytes=sent_bytes(mine[0].operation, mine[0].bytes, ranks, lanes) if carried is None else carried,
            )
        )
    return communications


def alone(ranks: Sequence[RankRecord], clocks: Sequence[Clock]) -> list[Latency]:
    """Each collective that was timed by itself, from when the last rank begins to when the last rank ends."""
    latencies = []
    for probes in zip(*(rank.collectives for rank in ranks), strict=True):
        lengths = []
        for times in zip(*(probe.times for probe in probes), strict=True):
            begun = max(clock(begin) for clock, (begin, _) in zip(clocks, times, strict=True))
            ended = max(clock(end) for clock, (_, end) in zip(clocks, times, strict=True))
            lengths.append(max(0, ended - begun))
        latencies.append(
            Latency(
                operation=probes[0].operation, bytes=probes[0].bytes, ms=spread(lengths), samples=len(probes[0].times)
            )
        )
    return latencies


def link(
    ranks: Sequence[RankRecord], communications: Sequence[Communication], latencies: Sequence[Latency], lanes: int = 0
) -> Link:
    """The slowest interface, and the bandwidth of a step and of the best collective by itself."""
    count = len(ranks)
    rates = [rank.rated_mbit_per_s for rank in ranks if rank.rated_mbit_per_s]
    busy = sum(op.ms for op in communications if op.link_bytes)
    carried = sum(op.link_bytes or 0.0 for op in communications)
    best = max(
        (sent_bytes(row.operation, row.bytes, count, lanes) / row.ms.median for row in latencies if row.ms.median),
        default=0.0,
    )
    return Link(
        interface=ranks[0].interface,
        rated_mbit_per_s=min(rates, default=None),
        measured_mbit_per_s=8e-3 * best or None,
        achieved_mbit_per_s=8e-3 * carried / busy if busy and carried else None,
    )


def within(operations: Sequence[Operation], step: TracedStep) -> list[Operation]:
    """The operations that ran in the step, with the bytes of those that core has requested, from its PUT events."""
    put: dict[str, list[tuple[int, int]]] = {}
    for name, _ in step.details:
        if name.startswith(trace_events.PUT):
            kind, *sizes = name.removeprefix(trace_events.PUT).split(":")
            put.setdefault(kind, []).append((int(sizes[0]), int(sizes[1])))
    mine = [op for op in operations if step.open <= op.start and op.end <= step.end]
    for kind, requested in put.items():
        indices = [index for index, op in enumerate(mine) if op.operation == kind]
        if len(indices) == len(requested):
            for place, (given, carried) in zip(indices, requested, strict=True):
                mine[place] = replace(mine[place], bytes=given, link_bytes=float(carried))
    return mine
