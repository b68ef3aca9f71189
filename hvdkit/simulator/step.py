"""Builds the graph of a training step from a workload, a network and settings.

The detailed graph of one case has a task for every layer and each stage of sending a bucket. The lean graph of many
cases has arrays as durations, and takes equally long for each case.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from hvdkit.simulator import engine, policies
from hvdkit.simulator.case import Case as Case
from hvdkit.simulator.engine import Edge, StepSchedule, TimedTask
from hvdkit.simulator.piecewise_linear import ZERO, BucketTimes, Floats

_AT_ONCE = 1000  # cases in memory
_AHEAD = 2  # batches that are read, or copied to the device, ahead of the one in use
Part = tuple[str, str, str | None, Any]  # of a bucket's way: label, kind, resource, seconds


def simulate(cases: Sequence[Case]) -> StepSchedule:
    """Run cases of one policy and one profile at once; times in the schedule are arrays of shape (cases,).

    Cases with several streams are run alone, since each goes to its streams in another order.
    """
    return engine.run(_graph(cases, detail=False))


def periods(cases: Sequence[Case]) -> Floats:
    """The step times of any cases of one profile, in seconds, shape (cases,)."""
    alike: dict[object, list[int]] = defaultdict(list)
    for index, case in enumerate(cases):
        alone = index if case.at_once > 1 else None
        alike[case.rules, case.compression.method, case.network.ranks == 1, case.stage, alone].append(index)
    seconds = np.zeros(len(cases))
    for indices in alike.values():
        for first in range(0, len(indices), _AT_ONCE):
            chunk = indices[first : first + _AT_ONCE]
            seconds[chunk] = simulate([cases[index] for index in chunk]).period
    return seconds


def period(case: Case) -> float:
    """The step time of one case, in seconds."""
    return float(engine.run(detailed(case)).period)


def detailed(case: Case) -> list[TimedTask]:
    """The graph of one case with every layer, every bucket and every part of its way."""
    return _graph([case], detail=True)


def _graph(cases: Sequence[Case], detail: bool) -> list[TimedTask]:
    builder = _Builder(cases, detail)
    read, batch_is_there = builder.input()
    gathered, weights_are_there, block_is_there = builder.gathering()
    compute, ready = builder.compute((*batch_is_there, *weights_are_there), block_is_there)
    sent, gradients_are_there = builder.communication(ready)
    seconds = builder.each(lambda case: case.slow * case.update_s / case.speed)
    return [*read, *gathered, *compute, *sent, TimedTask("update", "update", "device", seconds, gradients_are_there)]


class _Builder:
    """Builds the parts of a graph for cases that share a policy. Durations are numbers if `detail`, else arrays."""

    def __init__(self, cases: Sequence[Case], detail: bool) -> None:
        self.cases, self.detail = cases, detail
        self.rules = cases[0].rules
        self.tensors = cases[0].workload.tensors
        self.sizes = np.array([float(tensor.bytes) for tensor in self.tensors])
        self.before_backward: list[TimedTask] = []

    def array(self, value: Callable[[Case], float]) -> Floats:
        """A value of every case, shape (cases,)."""
        return np.array([value(case) for case in self.cases], float)

    def duration(self, row: Floats) -> Any:
        """A task's duration from those of all cases."""
        return float(row[0]) if self.detail else row

    def each(self, seconds: Callable[[Case], float]) -> Any:
        """A task's duration from its value for a case."""
        return self.duration(self.array(seconds))

    def input(self) -> tuple[list[TimedTask], tuple[Edge, ...]]:
        """Reading and decoding on the input workers, the copy to the device; and what forward has to wait for."""
        again = Edge("update", 1)
        read = Edge("forward", _AHEAD) if self.rules.reads_ahead else again
        copy = Edge("backward end", _AHEAD) if self.rules.copies_ahead else again
        read_s = self.each(lambda case: case.batch * case.workload.read_s)
        decode_s = self.each(lambda case: case.batch * case.workload.decode_s)
        copy_s = self.each(
            lambda case: case.batch * case.workload.copy_bytes / case.network.cluster.device.host_bytes_per_s
        )
        tasks: list[TimedTask] = []
        before: tuple[Edge, ...] = ()
        for name, kind, resource, seconds, edge in (
            ("read", "read", "input workers", read_s, read),
            ("decode", "decode", "input workers", decode_s, read),
            ("host to device", "copy", "copy engine", copy_s, copy),
        ):
            if np.any(seconds):
                tasks.append(TimedTask(name, kind, resource, seconds, (edge, *before)))
                before = (Edge(name),)
        return tasks, before

    def gathering(self) -> tuple[list[TimedTask], tuple[Edge, ...], dict[str, Edge]]:
        """Gathering sharded weights; what the first block waits for; and what the last blocks of forward and backward
        wait for, by these names: each gather comes one block ahead. Where nothing overlaps, blocks wait for all.
        """
        stage = self.cases[0].stage
        if stage == "none":
            return [], (), {}
        link = self.cases[0].network.levels[-1][0].name if self.detail else "network"
        updated = (Edge("update", 1),)
        if stage != "parameters":
            gather_s = self.each(lambda case: case.gather_s)
            return (
                [TimedTask("gather weights", "communication", link, gather_s, updated)],
                (Edge("gather weights"),),
                {},
            )
        first = self.each(lambda case: case.gather_s / case.workload.blocks)
        others = self.each(lambda case: case.gather_s * (1 - 1 / case.workload.blocks))
        if not self.rules.overlaps:
            self.before_backward = [TimedTask("gather in backward", "communication", "device", others)]
            forward = [
                TimedTask("gather the first block", "communication", "device", first, updated),
                TimedTask("gather in forward", "communication", "device", others),
            ]
            return forward, (Edge("gather in forward"),), {}
        tasks = [
            TimedTask("gather the first block", "communication", link, first, updated),
            TimedTask("gather in forward", "communication", link, others),
            TimedTask("gather in backward", "communication", link, others),
        ]
        ends = {kind: Edge(f"gather in {kind}") for kind in ("forward", "backward")}
        return tasks, (Edge("gather the first block"),), ends

    def compute(
        self, batch_is_there: tuple[Edge, ...], block_is_there: dict[str, Edge]
    ) -> tuple[list[TimedTask], Floats]:
        """The device's tasks up to the end of backward.

        Also returns when each gradient is ready, in seconds from the start of backward, shape (tensors, cases).
        """
        before_last = 1 - 1 / self.cases[0].workload.blocks if block_is_there else 1.0
        last_block = int(before_last * len(self.tensors))  # its first tensor in backward
        tasks = [
            TimedTask("between steps", "gap", "device", self.each(lambda case: case.workload.serial_s)),
            TimedTask("earlier batches", "forward", "device", self.each(lambda case: case.work * case.parts.earlier_s)),
        ]
        tasks = [task for task in tasks if np.any(task.seconds)]
        if self.detail:
            case = self.cases[0]
            for (layer, _), seconds in zip(case.workload.forward, case.parts.forward, strict=True):
                tasks.append(
                    TimedTask(f"forward {layer}", "forward", "device", before_last * case.work * float(seconds))
                )
        rest = 0.0 if self.detail else self.each(lambda case: before_last * case.work * case.parts.forward_s)
        tasks.append(TimedTask("forward", "forward", "device", rest))
        if block_is_there:
            last = self.each(lambda case: (1 - before_last) * case.work * case.parts.forward_s)
            tasks.append(
                TimedTask("forward of the last block", "forward", "device", last, (block_is_there["forward"],))
            )
        tasks[0] = replace(tasks[0], after=batch_is_there)
        tasks += self.before_backward
        segments = np.stack([case.work * case.parts.segments for case in self.cases], axis=1)
        encode = self._passes("encode_passes")
        self.encoded = encode > 0
        for i, tensor in enumerate(self.tensors):
            after = (block_is_there["backward"],) if block_is_there and i == last_block else ()
            tasks.append(TimedTask(f"backward {tensor.name}", "backward", "device", self.duration(segments[i]), after))
            if self.encoded[i].any():
                tasks.append(TimedTask(f"compress {tensor.name}", "compression", "device", self.duration(encode[i])))
        tail = self.each(lambda case: case.work * case.parts.tail_s)
        return [*tasks, TimedTask("backward end", "backward", "device", tail)], (segments + encode).cumsum(axis=0)

    def communication(self, ready: Floats) -> tuple[list[TimedTask], tuple[Edge, ...]]:
        """Sending and unpacking the buckets; and what the update has to wait for."""
        if all(case.network.ranks == 1 for case in self.cases):
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
        copied = buckets.closes & (index > firsts) & self.rules.fuses
        copies = np.where(copied, share * (2 * held / rate + launch_s), 0.0)
        # A rank takes its share of a bucket as it comes.
        back = copies if self.cases[0].stage == "none" and self.rules.copies_back else np.zeros_like(copies)
        decode = np.where(buckets.closes, _totals(self._passes("decode_passes"), firsts), 0.0)
        tasks: list[TimedTask] = []
        unpacked: list[TimedTask] = []
        streams = self.cases[0].at_once
        ends: list[tuple[Edge, ...]] = [()] * streams
        for number, i in enumerate(map(int, np.flatnonzero(buckets.closes.any(axis=1)))):
            others = int(i - firsts[i, 0])
            name = self.tensors[i].name + (f" +{others}" if self.detail and others else "")
            after = Edge(self._last_task(i) if self.rules.overlaps else "backward end")
            if buckets.gates is not None:
                wait = np.where(buckets.closes[i], np.maximum(0.0, buckets.gates[i] - ready[i]), 0.0)
                tasks.append(TimedTask(f"negotiate {name}", "negotiation", None, self.duration(wait), (after,)))
                after = Edge(tasks[-1].name)
            chain = (after, *ends[number % streams])
            for label, kind, resource, seconds in self._parts(phases, copies, back, firsts, i):
                tasks.append(TimedTask(f"{label} {name}", kind, resource, seconds, chain))
                chain = (Edge(tasks[-1].name),)
            ends[number % streams] = chain
            if decode[i].any():
                seconds = self.duration(decode[i])
                unpacked.append(TimedTask(f"decompress {name}", "compression", "device", seconds, chain))
        before = tuple(edge for end in ends for edge in end)
        joined = self.each(
            lambda case: (
                1e-6 * case.wire / case.every * case.network.cluster.software.several_hosts_us
                if case.network.hosts_used > 1
                else 0.0
            )
        )
        if np.any(joined):
            tasks.append(TimedTask("several hosts", "communication", None, joined, (*before, Edge("backward end"))))
            before = (Edge("several hosts"),)
        return [*tasks, *unpacked], (*before, Edge("backward end"))

    def _parts(self, phases: list[Floats], copies: Floats, back: Floats, firsts: Any, i: int) -> list[Part]:
        """The parts of a bucket's way; without detail they are one, unless other buckets are under way beside it."""
        case = self.cases[0]
        beside = case.at_once > 1
        if not self.detail and not beside:
            return [("communicate", "communication", "network", sum((row[i] for row in phases), copies[i] + back[i]))]
        link = case.network.levels[-1][0].name if self.detail else "network"
        stream = None if beside else "communication stream"
        steps: list[Part] = [("copy in", "fusion", stream, self.duration(copies[i]))]
        for number, (phase, cost, row) in enumerate(zip(case.traffic.phases, case.costs, phases, strict=True)):
            label = phase.operation if number == 0 else f"{phase.operation} {number + 1}"
            size = float(phase.sizes[firsts[i, 0] : i + 1].sum())
            if beside:  # what needs the link, and what does not
                alone = np.minimum(row[i], case.wire / case.every * size * float(cost.line.slope[-1]))
                steps.append((f"{label} latency", "communication", None, self.duration(row[i] - alone)))
                steps.append((label, "communication", link, self.duration(alone)))
            elif cost.algorithm == "hierarchical" and len(case.network.levels) > 1:
                part_s = [float(line(size)) if size else 0.0 for line in case.network.hierarchical()]
                near = case.network.levels[0][0].name
                for what, share_s, where in zip(("inside", "between", "back"), part_s, (near, link, near), strict=True):
                    seconds = self.duration(row[i]) * share_s / (sum(part_s) or 1.0)
                    steps.append((f"{label} {what}", "communication", where, seconds))
            else:
                steps.append((label, "communication", link, self.duration(row[i])))
        steps.append(("copy out", "fusion", stream, self.duration(back[i])))
        return [step for step in steps if np.any(step[3])]

    def _last_task(self, i: int) -> str:
        return f"{'compress' if self.encoded[i].any() else 'backward'} {self.tensors[i].name}"

    def _bucket_times(self) -> list[BucketTimes]:
        """One for each collective; cases that need fewer of them send nothing in the others."""
        nothing = np.zeros(len(self.tensors))
        times = []
        for row in itertools.zip_longest(*(zip(case.costs, case.traffic.phases, strict=True) for case in self.cases)):
            costs = [bucket[0].line if bucket else ZERO for bucket in row]
            times.append(
                BucketTimes(costs, np.stack([bucket[1].sizes if bucket else nothing for bucket in row], axis=1))
            )
        return times

    def _passes(self, side: Literal["encode_passes", "decode_passes"]) -> Floats:
        """Seconds for each tensor of the passes over its bytes at the device's memory rate, shape (tensors, cases).

        If the time of both sides together was measured, it is divided among them in proportion to the passes. Copies to
        the host and back are added.
        """
        sent = np.stack([getattr(case.traffic, side) for case in self.cases], axis=1)
        devices = [case.network.cluster.device for case in self.cases]
        scale = self.array(lambda case: case.slow / case.speed / case.every)
        byte_s = scale / [device.memory_bytes_per_s for device in devices]
        launch_s = scale * [1e-6 * device.launch_us for device in devices]
        seconds: Floats = sent * self.sizes[:, None] * byte_s + (sent > 0) * launch_s
        for column, case in enumerate(self.cases):
            if case.compression_s is not None:
                both = case.traffic.encode_passes + case.traffic.decode_passes
                mine = sent[:, column] if both.any() else np.full(len(both), 0.5)
                share = mine * self.sizes / ((both if both.any() else 1.0) * self.sizes).sum()
                seconds[:, column] = scale[column] * case.compression_s * share
            staging = case.network.cluster.software.staging_bytes_per_s
            if staging is not None and case.network.ranks > 1:
                seconds[:, column] += case.slow / case.every * case.staging_s(staging)
        return seconds


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
