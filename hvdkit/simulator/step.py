"""Builds the graph of a training step from a workload, a network and settings.

The detailed graph of one case has a task for every layer and each stage of sending a bucket. The lean graph of many
cases has arrays as durations, and takes equally long for each case.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hvdkit.simulator import engine, policies, priority
from hvdkit.simulator.case import Case as Case
from hvdkit.simulator.engine import Edge, TimedTask
from hvdkit.simulator.piecewise_linear import BucketTimes, Floats

_AT_ONCE = 1000  # cases in memory
_AHEAD = 2  # batches that are read, or copied to the device, ahead of the one in use


def periods(cases: Sequence[Case]) -> Floats:
    """The step times of any cases of one profile, in seconds, shape (cases,).

    Cases of one policy run at once; those with several streams, or priorities, alone: each has an order of its own.
    """
    alike: dict[object, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        alone = index if case.at_once > 1 or case.by_layer else None
        alike[case.rules, case.compression.method, case.data_ranks == 1, case.stage, alone].append(index)
    seconds = np.zeros(len(cases))
    for indices in alike.values():
        for first in range(0, len(indices), _AT_ONCE):
            chunk = indices[first : first + _AT_ONCE]
            seconds[chunk] = engine.run(_graph([cases[index] for index in chunk], detail=False)).period
    return seconds


def period(case: Case) -> float:
    """The step time of one case, in seconds."""
    return float(engine.run(detailed(case)).period)


def detailed(case: Case) -> list[TimedTask]:
    """The graph of one case with every layer, every bucket and every part of its way."""
    return _graph([case], detail=True)


def _graph(cases: Sequence[Case], detail: bool) -> list[TimedTask]:
    builder = _Builder(cases, detail or cases[0].by_layer)
    read, batch_is_there = builder.input()
    gathered, weights_are_there, block_is_there = builder.gathering()
    compute, ready = builder.compute((*batch_is_there, *weights_are_there), block_is_there)
    if cases[0].by_layer:
        compute = priority.forward_first(compute)
        tasks = [*read, *priority.by_layer(cases[0], compute, ready[:, 0], builder.encoded, builder.link)]
        return [replace(task, seconds=float(task.seconds[0])) for task in tasks] if detail else tasks
    sent, gradients_are_there = builder.communication(ready)
    update_s = builder.array(lambda case: case.slow * case.update_s / case.speed)
    tasks = [*read, *gathered, *compute, *sent, TimedTask("update", "update", "device", update_s, gradients_are_there)]
    return [replace(task, seconds=float(task.seconds[0])) for task in tasks] if detail else tasks


class _Builder:
    """Builds the parts of a graph for cases that share a policy. Durations have shape (cases,)."""

    def __init__(self, cases: Sequence[Case], detail: bool) -> None:
        self.cases, self.detail = cases, detail
        self.rules = cases[0].rules
        self.tensors = cases[0].workload.tensors
        self.sizes = cases[0].workload.sizes
        self.link = cases[0].network.levels[-1][0].name if detail and cases[0].network.levels else "network"
        self.before_backward: list[TimedTask] = []

    def array(self, value: Callable[[Case], float]) -> Floats:
        """A value of every case, shape (cases,)."""
        return np.array([value(case) for case in self.cases], float)

    def input(self) -> tuple[list[TimedTask], tuple[Edge, ...]]:
        """Reading and decoding on the input workers, the copy to the device; and what forward has to wait for."""
        again = Edge("update", 1)
        read = Edge("forward", _AHEAD) if self.rules.reads_ahead else again
        copy = Edge("backward end", _AHEAD) if self.rules.copies_ahead else again
        read_s = self.array(lambda case: case.accumulate * case.batch * case.workload.read_s)
        decode_s = self.array(lambda case: case.accumulate * case.batch * case.workload.decode_s)
        copy_s = self.array(
            lambda case: (
                case.accumulate * case.batch * case.workload.copy_bytes / case.network.cluster.device.host_bytes_per_s
            )
        )
        tasks: list[TimedTask] = []
        before: tuple[Edge, ...] = ()
        for name, kind, resource, seconds, edge in (
            ("read", "read", "input workers", read_s, read),
            ("decode", "decode", "input workers", decode_s, read),
            ("host to device", "copy", "copy engine", copy_s, copy),
        ):
            if seconds.any():
                tasks.append(TimedTask(name, kind, resource, seconds, (edge, *before)))
                before = (Edge(name),)
        return tasks, before

    def gathering(self) -> tuple[list[TimedTask], tuple[Edge, ...], dict[str, Edge]]:
        """Gathering sharded weights; what the first block waits for; and what the last blocks of forward and backward
        wait for, by these names: each gather comes one block ahead. Where nothing overlaps, blocks wait for all.
        """
        stage, updated = self.cases[0].stage, (Edge("update", 1),)
        if stage == "none":
            return [], (), {}

        def task(name: str, resource: str, share: Callable[[Case], float], after: tuple[Edge, ...] = ()) -> TimedTask:
            return TimedTask(name, "communication", resource, self.array(lambda c: c.gather_s * share(c)), after)

        if stage != "parameters":
            return [task("gather weights", self.link, lambda _: 1.0, updated)], (Edge("gather weights"),), {}
        on = self.link if self.rules.overlaps else "device"
        first = task("gather the first block", on, lambda case: 1 / case.workload.blocks, updated)
        forward, backward = (
            task(f"gather in {kind}", on, lambda case: 1 - 1 / case.workload.blocks) for kind in ("forward", "backward")
        )
        if self.rules.overlaps:
            ends = {"forward": Edge(forward.name), "backward": Edge(backward.name)}
            return [first, forward, backward], (Edge(first.name),), ends
        self.before_backward = [backward]
        return [first, forward], (Edge(forward.name),), {}

    def compute(
        self, batch_is_there: tuple[Edge, ...], block_is_there: dict[str, Edge]
    ) -> tuple[list[TimedTask], Floats]:
        """The device's tasks up to the end of backward.

        Also returns when each gradient is ready, in seconds from the start of backward, shape (tensors, cases).
        """
        before_last = 1 - 1 / self.cases[0].workload.blocks if block_is_there else 1.0
        last_block = int(before_last * len(self.tensors))  # its first tensor in backward
        earlier_s = self.array(lambda case: case.work * case.parts.earlier_s)
        tasks = [
            TimedTask("between steps", "gap", "device", self.array(lambda case: case.workload.serial_s)),
            TimedTask("earlier batches", "forward", "device", earlier_s),
        ]
        tasks = [task for task in tasks if task.seconds.any()]
        forward_s = self.array(lambda case: case.work * case.parts.forward_s)
        if self.detail:
            case = self.cases[0]
            for (layer, _), seconds in zip(case.workload.forward, case.parts.forward, strict=True):
                of_layer = np.array([before_last * case.work * seconds])
                tasks.append(TimedTask(f"forward {layer}", "forward", "device", of_layer))
        tasks.append(TimedTask("forward", "forward", "device", (not self.detail) * before_last * forward_s))
        if block_is_there:
            last, waits = (1 - before_last) * forward_s, (block_is_there["forward"],)
            tasks.append(TimedTask("forward of the last block", "forward", "device", last, waits))
        tasks[0] = replace(tasks[0], after=batch_is_there)
        tasks += self.before_backward
        segments = np.stack([case.work * case.parts.segments for case in self.cases], axis=1)
        encode = np.stack([case.passes_s(case.traffic.encode_passes) for case in self.cases], axis=1)
        self.encoded = [bool(row.any()) for row in encode]
        for i, tensor in enumerate(self.tensors):
            after = (block_is_there["backward"],) if block_is_there and i == last_block else ()
            tasks.append(TimedTask(f"backward {tensor.name}", "backward", "device", segments[i], after))
            if self.encoded[i]:
                tasks.append(TimedTask(f"compress {tensor.name}", "compression", "device", encode[i]))
        tail = self.array(lambda case: case.work * case.parts.tail_s)
        return [*tasks, TimedTask("backward end", "backward", "device", tail)], (segments + encode).cumsum(axis=0)

    def communication(self, ready: Floats) -> tuple[list[TimedTask], tuple[Edge, ...]]:
        """Sending and unpacking the buckets; and what the update has to wait for."""
        if all(case.data_ranks == 1 for case in self.cases):
            return [], (Edge("backward end"),)
        times = self._bucket_times()
        share = self.array(lambda case: case.wire / case.every)
        gradients = policies.GradientTimes(
            ready=ready,
            bytes=self.sizes,
            seconds=lambda first, last: share * sum(time.seconds(first, last) for time in times),
            threshold=self.array(lambda case: case.threshold_bytes),
            cycle_s=self.array(lambda case: case.cycle_s),
            bucket=self.array(lambda case: case.bucket_bytes),
            negotiation_s=self.array(lambda case: case.wire * case.network.negotiation_s),
            synchronous=np.array([case.network.cluster.software.synchronous for case in self.cases]),
        )
        buckets = self.rules.buckets(gradients)
        firsts = _firsts(buckets.closes)
        index = np.arange(len(self.tensors))[:, None]
        phases = [np.where(buckets.closes, share * time.seconds(firsts, index), 0.0) for time in times]
        # a copy into the fusion buffer, or out of it, reads and writes all the bucket's bytes
        device = [case.network.cluster.device for case in self.cases]
        rate, launch_s = np.array([(one.memory_bytes_per_s, 1e-6 * one.launch_us) for one in device]).T
        held = _totals(np.broadcast_to(self.sizes[:, None], ready.shape), firsts)
        in_memory = np.array([case.network.in_memory for case in self.cases])  # straight from tensors into it, and back
        copied = buckets.closes & (index > firsts) & self.rules.fuses & ~in_memory
        copies = np.where(copied, share * (2 * held / rate + launch_s), 0.0)
        # A rank takes its share of a bucket as it comes.
        back = copies if self.cases[0].stage == "none" and self.rules.copies_back else np.zeros_like(copies)
        decode = np.stack([case.passes_s(case.traffic.decode_passes) for case in self.cases], axis=1)
        decode = np.where(buckets.closes, _totals(decode, firsts), 0.0)
        tasks: list[TimedTask] = []
        unpacked: list[TimedTask] = []
        streams = self.cases[0].at_once
        ends: list[tuple[Edge, ...]] = [()] * streams
        for number, i in enumerate(map(int, np.flatnonzero(buckets.closes.any(axis=1)))):
            others = int(i - firsts[i, 0])
            name = self.tensors[i].name + (f" +{others}" if self.detail and others else "")
            last = f"{'compress' if self.encoded[i] else 'backward'} {self.tensors[i].name}"
            after = Edge(last if self.rules.overlaps else "backward end")
            if buckets.gates is not None:
                wait = np.where(buckets.closes[i], np.maximum(0.0, buckets.gates[i] - ready[i]), 0.0)
                tasks.append(TimedTask(f"negotiate {name}", "negotiation", None, wait, (after,)))
                after = Edge(tasks[-1].name)
            chain = (after, *ends[number % streams])
            for label, kind, resource, seconds in self._way(phases, copies, back, firsts, i):
                tasks.append(TimedTask(f"{label} {name}", kind, resource, seconds, chain))
                chain = (Edge(tasks[-1].name),)
            ends[number % streams] = chain
            if decode[i].any():
                unpacked.append(TimedTask(f"decompress {name}", "compression", "device", decode[i], chain))
        before = tuple(edge for end in ends for edge in end)
        several_hosts_s = share * self.array(
            lambda case: 1e-6 * case.network.cluster.software.several_hosts_us * (case.network.hosts_used > 1)
        )
        if several_hosts_s.any():
            after_all = (*before, Edge("backward end"))
            tasks.append(TimedTask("several hosts", "communication", None, several_hosts_s, after_all))
            before = (Edge("several hosts"),)
        return [*tasks, *unpacked], (*before, Edge("backward end"))

    def _way(
        self, phases: list[Floats], copies: Floats, back: Floats, firsts: Any, i: int
    ) -> list[tuple[str, str, str | None, Floats]]:
        """A bucket's way: label, kind, resource and seconds of each piece.

        Without detail it is one piece, unless other buckets are under way beside it.
        """
        case = self.cases[0]
        beside = case.at_once > 1
        if not self.detail and not beside:
            return [("communicate", "communication", "network", sum((row[i] for row in phases), copies[i] + back[i]))]
        stream = None if beside else "communication stream"
        steps: list[tuple[str, str, str | None, Floats]] = [("copy in", "fusion", stream, copies[i])]
        for number, (phase, cost, row) in enumerate(zip(case.traffic.phases, case.costs, phases, strict=True)):
            label = phase.operation if number == 0 else f"{phase.operation} {number + 1}"
            size = float(phase.sizes[firsts[i, 0] : i + 1].sum())
            if beside:  # what needs the link, and what does not
                alone = np.minimum(row[i], case.wire / case.every * size * float(cost.line.slope[-1]))
                steps.append((f"{label} latency", "communication", None, row[i] - alone))
                steps.append((label, "communication", self.link, alone))
            elif cost.algorithm == "hierarchical" and len(case.network.levels) > 1:
                parts_s = [float(line(size)) if size else 0.0 for line in case.network.hierarchical()]
                near, whole_s = case.network.levels[0][0].name, sum(parts_s) or 1.0
                ways = (("inside", near), ("between", self.link), ("back", near))
                for (what, on), part_s in zip(ways, parts_s, strict=True):
                    steps.append((f"{label} {what}", "communication", on, row[i] * part_s / whole_s))
            else:
                steps.append((label, "communication", self.link, row[i]))
        steps.append(("copy out", "fusion", stream, back[i]))
        return [step for step in steps if step[3].any()]

    def _bucket_times(self) -> list[BucketTimes]:
        """One for each collective."""
        return [
            BucketTimes(
                [case.costs[number].line for case in self.cases],
                np.stack([case.traffic.phases[number].sizes for case in self.cases], axis=1),
            )
            for number in range(len(self.cases[0].costs))
        ]


def _firsts(closes: Any) -> Any:
    """For each tensor, the index of the first tensor in its bucket, shape (tensors, cases)."""
    starts = np.zeros(closes.shape, int)
    starts[1:] = np.where(closes[:-1], np.arange(1, len(closes))[:, None], 0)
    return np.maximum.accumulate(starts, axis=0)


def _totals(values: Floats, firsts: Any) -> Floats:
    """For each tensor, the sum of its bucket's values up to it, shape (tensors, cases) as all of these."""
    cumulative = np.concatenate([np.zeros((1, values.shape[1])), values.cumsum(axis=0)])
    totals: Floats = cumulative[1:] - np.take_along_axis(cumulative, firsts, axis=0)
    return totals
