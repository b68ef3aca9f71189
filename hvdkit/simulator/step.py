"""From a workload, a network and settings to the graph of a step: in full for one case, or lean for many at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from hvdkit.simulator import engine, policies, wire
from hvdkit.simulator.cluster import Algorithm
from hvdkit.simulator.costs import Cost, Network
from hvdkit.simulator.engine import Schedule
from hvdkit.simulator.graph import Edge, Graph, Task, ordered
from hvdkit.simulator.lines import Floats
from hvdkit.simulator.traffic import Lane, lane
from hvdkit.simulator.wire import Compression, Wire
from hvdkit.simulator.workload import Workload

_DENSE = Compression()
_AHEAD = 2  # batches that are read, or brought to the device, ahead of the one at work


@dataclass(frozen=True)
class Case:
    """One what-if, resolved. `batch` is the batch size as a share of the workload's, `speed` the device's against its.

    `compression_s` is what it takes to make of all gradients what is sent, and back, where that has been measured.
    `slow` multiplies the compute of the rank that all wait for, `wire` communication. Forward and backward grow with
    the batch; the update does not. That work is proportional to the images is what small batches break.

    With `every` above 1 ranks average their weights only so often (Local SGD): all of it behind backward, where an
    average step bears its share.
    """

    workload: Workload
    network: Network
    policy: str = "horovod"
    compression: Compression = _DENSE
    compression_s: float | None = None
    algorithm: Algorithm | None = None
    threshold_bytes: float = 64 * 2.0**20
    cycle_s: float = 1e-3
    bucket_bytes: float = 25 * 2.0**20
    every: int = 1
    servers: int = 1
    batch: float = 1.0
    speed: float = 1.0
    slow: float = 1.0
    wire: float = 1.0

    @property
    def work(self) -> float:
        """What multiplies forward and backward."""
        return self.slow * self.batch / self.speed

    @property
    def rules(self) -> policies.Policy:
        """The policy; Local SGD leaves nothing to overlap with."""
        policy = policies.named(self.policy)
        return replace(policy, overlaps=False, fuses=True, buckets=policies.grouped) if self.every > 1 else policy

    @cached_property
    def sent(self) -> Wire:
        """What the compression makes of the gradients."""
        return wire.wire(self.compression, self.workload, self.network.ranks)

    @cached_property
    def costs(self) -> list[Cost]:
        """Of each collective that a bucket needs."""
        chosen = self.algorithm or self.rules.algorithm
        return [
            self.network.cost(phase.operation, chosen if phase.operation == "allreduce" else None, self.servers)
            for phase in self.sent.phases
        ]

    @property
    def alone(self) -> Case:
        """The same step of a rank that communicates with nobody: what an ideal network would leave."""
        return replace(self, network=Network(self.network.cluster, 1), compression=_DENSE, compression_s=None)


def simulate(cases: Sequence[Case]) -> Schedule:
    """Run cases of one policy and one profile at once; times in the schedule have one element for each."""
    return engine.run(_graph(cases, full=False))


def detailed(case: Case) -> Graph:
    """The graph of one case with every layer, every bucket and every part of its way."""
    return _graph([case], full=True)


def _graph(cases: Sequence[Case], full: bool) -> Graph:
    make = _Maker(cases, full)
    read, brought = make.input()
    compute, ready = make.compute(brought)
    sent, done = make.communication(ready)
    update = Task(
        "update", "update", "device", make.each(lambda case: case.slow * case.workload.update_s / case.speed), done
    )
    return ordered([*read, *compute, *sent, update], "update")


class _Maker:
    """Makes the parts of a graph for cases that share a policy. Durations are numbers where `full`, else arrays."""

    def __init__(self, cases: Sequence[Case], full: bool) -> None:
        self.cases, self.full = cases, full
        self.rules = cases[0].rules
        self.tensors = cases[0].workload.tensors
        self.sizes = np.array([float(tensor.bytes) for tensor in self.tensors])

    def each(self, seconds: Callable[[Case], float]) -> Any:
        """A duration of every case."""
        return seconds(self.cases[0]) if self.full else np.array([seconds(case) for case in self.cases])

    def of(self, row: Floats) -> Any:
        """A row of durations, one for each case."""
        return float(row[0]) if self.full else row

    def input(self) -> tuple[list[Task], tuple[Edge, ...]]:
        """Read and decode on the input workers, the copy to the device; and what forward has to wait for."""
        again = Edge("update", 1)
        read = Edge("forward", _AHEAD) if self.rules.reads_ahead else again
        copy = Edge("backward end", _AHEAD) if self.rules.copies_ahead else again
        rate = [case.network.cluster.device.host_bytes_per_s for case in self.cases]
        tasks = [
            Task("read", "read", "input workers", self.each(lambda case: case.batch * case.workload.read_s), (read,)),
            Task(
                "decode",
                "decode",
                "input workers",
                self.each(lambda case: case.batch * case.workload.decode_s),
                (read,),
            ),
            Task(
                "host to device",
                "copy",
                "copy engine",
                self.of(np.array([case.batch * case.workload.copy_bytes for case in self.cases]) / rate),
                (copy,),
            ),
        ]
        chained: list[Task] = []
        before: tuple[Edge, ...] = ()
        for task in tasks:
            if np.any(task.seconds):
                chained.append(replace(task, after=task.after + before))
                before = (Edge(task.name),)
        return chained, before

    def compute(self, brought: tuple[Edge, ...]) -> tuple[list[Task], Floats]:
        """What the device does up to the end of backward, and when each gradient is ready after backward's begin."""
        tasks = [
            Task("between steps", "gap", "device", self.each(lambda case: case.workload.serial_s)),
            Task("earlier batches", "forward", "device", self.each(lambda case: case.work * case.workload.earlier_s)),
        ]
        tasks = [task for task in tasks if np.any(task.seconds)]
        if self.full:
            case = self.cases[0]
            for layer, seconds in case.workload.forward:
                tasks.append(Task(f"forward {layer}", "forward", "device", case.work * seconds))
        rest = 0.0 if self.full else self.each(lambda case: case.work * case.workload.forward_s)
        tasks.append(Task("forward", "forward", "device", rest))
        tasks[0] = replace(tasks[0], after=brought)
        work = np.array([case.work for case in self.cases])
        segments = np.array([[tensor.segment_s] for tensor in self.tensors]) * work
        encode = self._passes("encode_passes")
        self.encoded = encode > 0
        for i, tensor in enumerate(self.tensors):
            tasks.append(Task(f"backward {tensor.name}", "backward", "device", self.of(segments[i])))
            if self.encoded[i].any():
                tasks.append(Task(f"compress {tensor.name}", "compression", "device", self.of(encode[i])))
        tail = self.each(lambda case: case.work * case.workload.tail_s)
        return [*tasks, Task("backward end", "backward", "device", tail)], (segments + encode).cumsum(axis=0)

    def communication(self, ready: Floats) -> tuple[list[Task], tuple[Edge, ...]]:
        """Buckets on their way and what the device does to unpack them; and what the update has to wait for."""
        if all(case.network.ranks == 1 for case in self.cases):
            return [], (Edge("backward end"),)
        lanes = self._lanes()
        share = np.array([case.wire / case.every for case in self.cases])
        gradients = policies.Gradients(ready, self.sizes, lambda a, b: share * sum(x.seconds(a, b) for x in lanes))
        buckets = self.rules.buckets(gradients, self._options())
        firsts = _firsts(buckets.closes)
        index = np.arange(len(self.tensors))[:, None]
        way = [np.where(buckets.closes, share * each.seconds(firsts, index), 0.0) for each in lanes]
        copies = np.where(buckets.closes & (index > firsts), share * self._copy(firsts, index), 0.0)
        through = np.concatenate([np.zeros((1, len(self.cases))), self._passes("decode_passes").cumsum(0)])
        decode = np.where(buckets.closes, through[1:] - np.take_along_axis(through, firsts, axis=0), 0.0)
        tasks: list[Task] = []
        unpacked: list[Task] = []
        before: tuple[Edge, ...] = ()
        for i in map(int, np.flatnonzero(buckets.closes.any(axis=1))):
            others = int(i - firsts[i, 0])
            name = self.tensors[i].name + (f" +{others}" if self.full and others else "")
            after = Edge(self._last_of(i) if self.rules.overlaps else "backward end")
            if buckets.gates is not None:
                wait = np.where(buckets.closes[i], np.maximum(0.0, buckets.gates[i] - ready[i]), 0.0)
                tasks.append(Task(f"negotiate {name}", "negotiation", None, self.of(wait), (after,)))
                after = Edge(tasks[-1].name)
            chain = (after, *before)
            for label, kind, resource, seconds in self._way(way, copies, firsts, i):
                tasks.append(Task(f"{label} {name}", kind, resource, seconds, chain))
                chain = (Edge(tasks[-1].name),)
            before = chain[:1] if len(chain) == 1 else chain
            if decode[i].any():
                unpacked.append(Task(f"decompress {name}", "compression", "device", self.of(decode[i]), chain))
        return [*tasks, *unpacked], (*before, Edge("backward end"))

    def _way(self, way: list[Floats], copies: Floats, firsts: Any, i: int) -> list[tuple[str, str, str, Any]]:
        """A bucket's way: (label, kind, resource, seconds) one after the other; in one where many cases run."""
        if not self.full:
            return [("communicate", "communication", "network", sum((row[i] for row in way), 2 * copies[i]))]
        case = self.cases[0]
        link = case.network.levels[-1][0].name
        found = [("copy in", "fusion", "communication stream", self.of(copies[i]))]
        for number, (phase, cost, row) in enumerate(zip(case.sent.phases, case.costs, way, strict=True)):
            label = phase.operation if number == 0 else f"{phase.operation} {number + 1}"
            if cost.algorithm == "hierarchical" and len(case.network.levels) > 1:
                size = float(phase.sizes[firsts[i, 0] : i + 1].sum())
                parts = [float(line(size)) if size else 0.0 for line in case.network.hierarchical()]
                near = case.network.levels[0][0].name
                for what, part, where in zip(("inside", "between", "back"), parts, (near, link, near), strict=True):
                    seconds = self.of(row[i]) * part / (sum(parts) or 1.0)
                    found.append((f"{label} {what}", "communication", where, seconds))
            else:
                found.append((label, "communication", link, self.of(row[i])))
        found.append(("copy out", "fusion", "communication stream", self.of(copies[i])))
        return [part for part in found if part[3]]

    def _last_of(self, i: int) -> str:
        name = self.tensors[i].name
        encoded = self.encoded[i].any()
        return f"{'compress' if encoded else 'backward'} {name}"

    def _lanes(self) -> list[Lane]:
        lanes = []
        for number in range(max(len(case.sent.phases) for case in self.cases)):
            has = [case if number < len(case.sent.phases) else None for case in self.cases]
            found = [case.costs[number].line if case else None for case in has]
            lanes.append(
                lane(found, [case.sent.phases[number].sizes if case else None for case in has], len(self.tensors))
            )
        return lanes

    def _passes(self, side: Literal["encode_passes", "decode_passes"]) -> Floats:
        """Seconds by tensor of passes over its bytes at the device's memory rate, by Local SGD every few steps.

        Where what both sides take was measured, the passes are how it is shared out.
        """
        each = np.stack([getattr(case.sent, side) for case in self.cases], axis=1)
        devices = [case.network.cluster.device for case in self.cases]
        scale = np.array([case.slow / case.speed / case.every for case in self.cases])
        a_byte = scale / [device.memory_bytes_per_s for device in devices]
        a_launch = scale * [1e-6 * device.launch_us for device in devices]
        seconds: Floats = each * self.sizes[:, None] * a_byte + (each > 0) * a_launch
        for column, case in enumerate(self.cases):
            if case.compression_s is not None:
                both = case.sent.encode_passes + case.sent.decode_passes
                mine = each[:, column] if both.any() else np.full(len(both), 0.5)
                share = mine * self.sizes / ((both if both.any() else 1.0) * self.sizes).sum()
                seconds[:, column] = scale[column] * case.compression_s * share
        return seconds

    def _copy(self, firsts: Any, index: Any) -> Floats:
        """Seconds to copy a bucket into the fusion buffer: a read and a write of what is sent."""
        if not self.rules.fuses:
            return np.zeros(firsts.shape)
        through = np.concatenate([[0.0], self.sizes.cumsum()])
        bytes_ = through[index + 1] - through[firsts]
        rate = np.array([case.network.cluster.device.memory_bytes_per_s for case in self.cases])
        launch = np.array([1e-6 * case.network.cluster.device.launch_us for case in self.cases])
        seconds: Floats = 2 * bytes_ / rate + launch
        return seconds

    def _options(self) -> policies.Options:
        def array(value: Callable[[Case], float]) -> Floats:
            return np.array([value(case) for case in self.cases], float)

        return policies.Options(
            threshold=array(lambda case: case.threshold_bytes),
            cycle_s=array(lambda case: case.cycle_s),
            bucket=array(lambda case: case.bucket_bytes),
            negotiation_s=array(_negotiation),
            synchronous=np.array([case.network.cluster.software.synchronous for case in self.cases]),
        )


def _negotiation(case: Case) -> float:
    software = case.network.cluster.software
    return 1e-6 * (software.negotiation_us + software.negotiation_us_per_rank * case.network.ranks)


def _firsts(closes: Any) -> Any:
    """The index of each tensor's bucket's first tensor."""
    starts = np.zeros(closes.shape, int)
    starts[1:] = np.where(closes[:-1], np.arange(1, len(closes))[:, None], 0)
    return np.maximum.accumulate(starts, axis=0)
