"""The policy `priority`: gradients in pieces, first layer first, and no layer waits for another's update.

A unit of gradients (`core/order.py`) is ready when backward has finished its last one. Whenever the network is free it
sends a piece of the unit that forward needs first, among those that are ready. The next forward begins as soon as
the first unit has been averaged: each layer waits for the updates of its own units only.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hvdkit.core.order import pieces, units
from hvdkit.simulator.case import Case
from hvdkit.simulator.engine import Edge, TimedTask
from hvdkit.simulator.piecewise_linear import Floats


def by_layer(
    case: Case, compute: Sequence[TimedTask], ready: Floats, encoded: Sequence[bool], link: str
) -> list[TimedTask]:
    """The tasks of a step, whose forward begins under way; it ends with backward.

    `compute` has the detailed tasks up to the end of backward, `ready` is when each gradient can be sent, in seconds
    from the start of backward, by backward's order, as `encoded`, whether it is compressed before.
    """
    work, count = case.workload, len(case.workload.tensors)
    order = range(count - 1, -1, -1)  # of forward
    sizes = [work.sizes[i] for i in order]
    groups = [[order[j] for j in unit] for unit in units(sizes, case.piece_bytes)]
    names = [work.tensors[group[0]].name + (f" +{len(group) - 1}" if len(group) > 1 else "") for group in groups]
    numbers = [pieces(float(work.sizes[group].sum()), case.piece_bytes) for group in groups]
    seconds = [_piece_s(case, group, number) for group, number in zip(groups, numbers, strict=True)]
    last = [group[0] for group in groups]  # backward finishes a unit's first gradient of forward last
    sent, ends = [], {}
    for unit, piece in first_needed_first([float(ready[i]) for i in last], numbers, seconds):
        i, name = last[unit], f"allreduce {names[unit]} {piece + 1}/{numbers[unit]}"
        after = Edge(f"{'compress' if encoded[i] else 'backward'} {work.tensors[i].name}")
        sent.append(TimedTask(name, "communication", link, _array(seconds[unit]), (after,)))
        ends[unit] = Edge(name, 1)
    decode = case.passes_s(case.traffic.decode_passes)
    share_s = case.slow * case.update_s / case.speed / max(1.0, float(work.sizes.sum()))
    waiting: dict[str, list[TimedTask]] = {}
    for unit, (group, layer) in enumerate(zip(groups, _first_layers(case, groups), strict=True)):
        update_s = share_s * float(work.sizes[group].sum()) + float(decode[group].sum())
        update = TimedTask(f"update {names[unit]}", "update", "device", _array(update_s), (ends[unit],))
        waiting.setdefault(layer, []).append(update)
    tasks: list[TimedTask] = []
    for task in compute:
        tasks += [*waiting.pop(task.name, ()), task]
    return [*tasks, *sent, TimedTask("step end", "update", "device", _array(0.0), (Edge("backward end"),))]


def first_needed_first(
    ready: Sequence[float], numbers: Sequence[int], seconds: Sequence[float]
) -> list[tuple[int, int]]:
    """The order in which pieces are sent, as (unit, piece); units are in forward order.

    `ready` is when each unit can be sent, `numbers` are its pieces, each of which takes its `seconds`.
    """
    coming = sorted(range(len(ready)), key=lambda unit: (ready[unit], unit), reverse=True)
    left, here, now, found = list(numbers), list[int](), 0.0, []
    while coming or here:
        if not here:
            now = max(now, ready[coming[-1]])
        while coming and ready[coming[-1]] <= now:
            heapq.heappush(here, coming.pop())
        unit = here[0]
        found.append((unit, numbers[unit] - left[unit]))
        left[unit] -= 1
        now += seconds[unit]
        if not left[unit]:
            heapq.heappop(here)
    return found


def _piece_s(case: Case, group: Sequence[int], number: int) -> float:
    """How long one of so many pieces of a unit takes, with the agreement of the ranks that it is next."""
    share = case.wire / case.every
    sizes = [float(phase.sizes[group].sum()) / number for phase in case.traffic.phases]
    alone_s = sum(float(cost.line(size)) for cost, size in zip(case.costs, sizes, strict=True) if size)
    network, part = case.network, float(case.workload.sizes[group].sum()) / float(case.workload.sizes.sum()) / number
    several_hosts_s = 1e-6 * network.cluster.software.several_hosts_us * (network.hosts_used > 1)
    return share * (alone_s + part * several_hosts_s) + case.wire * network.negotiation_s


def _first_layers(case: Case, groups: Sequence[Sequence[int]]) -> list[str]:
    """The task of the first forward layer that needs each unit.

    A tensor whose layer was not timed is needed where the one before it is; if no layer was, all at the start.
    """
    index = {layer: number for number, (layer, _) in enumerate(case.workload.forward)}
    found, here = [], 0
    for group in groups:
        needed = []
        for i in group:
            tensor = case.workload.tensors[i]
            here = index.get(tensor.layer, index.get(tensor.name, here))
            needed.append(here)
        found.append(f"forward {case.workload.forward[min(needed)][0]}")
    return found


def _array(seconds: float) -> Floats:
    return np.array([seconds])


def forward_first(tasks: Sequence[TimedTask]) -> list[TimedTask]:
    """The same with the earlier batches of an update after the first forward, which is what waits for weights."""
    earlier = [task for task in tasks if task.name == "earlier batches"]
    if not earlier:
        return list(tasks)
    rest = [task for task in tasks if task.name != "earlier batches"]
    rest[0] = replace(rest[0], after=tasks[0].after)
    at = [task.name for task in rest].index("forward") + 1
    return [*rest[:at], replace(earlier[0], after=()), *rest[at:]]
