"""One what-if with all values chosen: what is sent, by which costs, and how long compute takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from hvdkit.core.pieces import PIECE_BYTES
from hvdkit.results.memory import Stage
from hvdkit.simulator import compression_costs, policies
from hvdkit.simulator.batch_curves import ComputeTimes
from hvdkit.simulator.cluster import Algorithm
from hvdkit.simulator.compression_costs import CompressionSetting, SentBytes, Traffic
from hvdkit.simulator.costs import ClusterLinks, CollectiveCost, balanced_servers
from hvdkit.simulator.piecewise_linear import Floats
from hvdkit.simulator.workload import Workload

_DENSE = CompressionSetting()


@dataclass(frozen=True)
class Case:
    """One what-if with all values chosen.

    An update takes `accumulate` times as many batches as the workload's. `batch` is the batch size relative
    to the workload's, `speed` the device's speed relative to the profile's. `compression_s` is the
    measured time to turn all gradients into what is sent and back, None if it was not measured.
    `slow` multiplies the compute of the slowest rank, `wire` multiplies communication. `jitter` is the coefficient of
    variation of a rank's compute, which `seed` draws. Forward and backward follow the
    workload's times by batch size, but take no less than their kernels' launches; the update does not depend on it.

    Over `streams`, as many collectives are under way at once. They share the links: each has one for its bytes at the
    highest rate, and only the rest of its time, such as latencies, passes beside that of others.

    Under `priority`, gradients are sent in pieces of about `piece_bytes`.

    With `sharding` gradients are reduce-scattered, each rank updates its share, and weights are gathered: after the
    update, or, in stage `parameters`, block after block in forward and again in backward, each while the one before it
    computes.

    If `every` is above 1, ranks average their weights only every so many steps (Local SGD), after backward; a step then
    has its share of that time.
    """

    workload: Workload
    network: ClusterLinks
    policy: str = "horovod"
    compression: CompressionSetting = _DENSE
    compression_s: float | None = None
    algorithm: Algorithm | None = None
    threshold_bytes: float = 64 * 2.0**20
    cycle_s: float = 1e-3
    bucket_bytes: float = 25 * 2.0**20
    piece_bytes: float = PIECE_BYTES
    every: int = 1
    servers: int = 1
    sharding: Stage = "none"
    streams: int = 1
    batch: float = 1.0
    accumulate: int = 1
    speed: float = 1.0
    slow: float = 1.0
    wire: float = 1.0
    jitter: float = 0.0
    seed: int = 1

    @property
    def data_ranks(self) -> int:
        """How many ranks read different samples, and average their gradients; so far each one does."""
        return self.network.ranks

    @property
    def samples(self) -> float:
        """The samples of a step, of all ranks."""
        return self.data_ranks * self.batch * self.workload.batch_size * self.accumulate

    @property
    def parts(self) -> ComputeTimes:
        """Forward and backward at the batch size, on the profile's device."""
        parts = self.workload.parts(self.batch)
        if self.accumulate == 1:
            return parts
        return replace(parts, earlier_s=parts.earlier_s + (self.accumulate - 1) * parts.whole_s)

    @cached_property
    def work(self) -> float:
        """The factor of forward and backward, by the device's speed and the slowest rank.

        A batch has a kernel in forward and two in backward for each layer at least, whose launches take their time.
        """
        work_s = self.parts.whole_s
        launches_s = 1e-6 * self.accumulate * self.network.cluster.device.launch_us * 3 * len(self.workload.forward)
        least = min(self.accumulate * self.workload.compute_s, launches_s) / work_s if work_s > 0 else 1.0
        return self.slow * max(1 / self.speed, least)

    def passes_s(self, passes: Floats) -> Floats:
        """Seconds for each tensor of so many passes over its bytes, before or after it is sent, shape (tensors,).

        If the time of all passes was measured, it is divided among them. The device waits for copies to the host, or
        back.
        """
        device, sizes = self.network.cluster.device, self.workload.sizes
        if self.compression_s is None:
            seconds = passes * sizes / device.memory_bytes_per_s + 1e-6 * device.launch_us * (passes > 0)
            if passes is self.traffic.encode_passes and self.assumes_selection:
                seconds = np.maximum(seconds, self.traffic.encode_least_s)
        else:
            both = self.traffic.encode_passes + self.traffic.decode_passes
            mine, both = (passes, both) if both.any() else (0.5 * np.ones(len(sizes)), np.ones(len(sizes)))
            seconds = self.compression_s * mine * sizes / (both * sizes).sum()
        seconds = seconds / self.speed
        staging = self.network.cluster.software.staging_bytes_per_s
        if staging is not None and self.data_ranks > 1:
            sent: Floats = np.sum([phase.sizes for phase in self.traffic.phases], axis=0)
            seconds = seconds + sent / staging + 1e-6 * device.launch_us * (sent > 0)
        return seconds * (self.slow / self.every)

    @property
    def assumes_selection(self) -> bool:
        """Whether how long a GPU chooses values is assumed (`compression_costs.SELECTION_S`)."""
        unknown = self.compression_s is None and self.network.cluster.device.memory_mib is not None
        return unknown and bool(self.traffic.encode_least_s.any())

    @property
    def at_once(self) -> int:
        """How many collectives are under way at once."""
        return 1 if self.rules.in_turn else self.streams

    @property
    def by_layer(self) -> bool:
        """Whether gradients go first layer first; shares of sharding do not."""
        return self.rules.by_layer and self.data_ranks > 1 and self.stage == "none"

    @property
    def rules(self) -> policies.Policy:
        """The policy; with Local SGD nothing overlaps, and joined gradients need no buffer."""
        policy = policies.named(self.policy)
        if self.every > 1:
            return replace(policy, overlaps=False, fuses=True, buckets=policies.grouped, by_layer=False)
        in_groups = self.policy == "grouped" and self.compression == _DENSE and self.stage in ("none", "optimizer")
        if not in_groups:
            return policy
        return replace(policy, fuses=not self.workload.joined, copies_back=not self.workload.as_one)

    @cached_property
    def traffic(self) -> Traffic:
        """What is sent for the gradients."""
        traffic = compression_costs.traffic(self.compression, self.workload, self.data_ranks)
        if self.compression.method == "topk" and not traffic.warning and self.data_ranks > 1:
            dense = compression_costs.traffic(_DENSE, self.workload, self.data_ranks)
            chosen = self.algorithm or self.rules.algorithm
            gathered, summed = (
                float(self.network.cost(phase.operation, chosen if phase.operation == "allreduce" else None).line(sent))
                for phase, sent in ((way.phases[0], float(way.phases[0].sizes.sum())) for way in (traffic, dense))
            )
            if gathered > summed:
                told = f"top-k of {self.compression.ratio:g} takes longer to send than uncompressed gradients"
                # What top-k computes stays, else a better link could make a step longer.
                told = f"{told} at {self.data_ranks} ranks, so these are predicted"
                traffic = replace(traffic, phases=dense.phases, warning=told)
        if self.stage == "none":
            return traffic
        return replace(traffic, phases=tuple(SentBytes("reducescatter", phase.sizes) for phase in traffic.phases))

    @property
    def stage(self) -> Stage:
        """The stage of sharding; none on one rank."""
        return self.sharding if self.data_ranks > 1 else "none"

    @property
    def update_s(self) -> float:
        """The update of what a rank updates.

        Where parameters are not parts of vectors, its share is copied out of them, and the gathered weights into them.
        """
        if self.stage == "none":
            return self.workload.update_s
        ranks, device = self.data_ranks, self.network.cluster.device
        parameter_bytes = 0 if "parameters" in self.workload.stages else self.workload.gradient_bytes
        return self.workload.update_s / ranks + 2 * parameter_bytes * (1 + 1 / ranks) / device.memory_bytes_per_s

    @property
    def gathered_bytes(self) -> float:
        """What a rank puts into gathers of weights: its share, in stage `parameters` in forward and in backward."""
        times = {"none": 0, "parameters": 2}.get(self.stage, 1)
        return times * self.workload.gradient_bytes / self.data_ranks

    @property
    def gather_s(self) -> float:
        """How long it takes to gather all weights from their shares, a bucket after the other."""
        if self.stage == "none":
            return 0.0
        buckets = max(1, round(self.workload.gradient_bytes / self.bucket_bytes))
        bucket_s = self.network.cost("allgather").line(self.workload.gradient_bytes / buckets / self.data_ranks)
        return self.wire * buckets * float(bucket_s)

    @cached_property
    def costs(self) -> list[CollectiveCost]:
        """The cost of each collective that a bucket needs."""
        chosen = self.algorithm or self.rules.algorithm
        servers = 1.0
        if self.servers > 1 and self.data_ranks > 1:
            sizes = [float(tensor.bytes) for tensor in reversed(self.workload.tensors)]
            servers = balanced_servers(sizes, min(self.servers, self.network.most_servers))
        return [
            self.network.cost(phase.operation, chosen if phase.operation == "allreduce" else None, servers)
            for phase in self.traffic.phases
        ]

    @property
    def alone(self) -> Case:
        """The same step without communication, as an ideal network would give it."""
        return replace(self, network=ClusterLinks(self.network.cluster, 1), compression=_DENSE, compression_s=None)
