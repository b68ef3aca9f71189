"""How long collectives take: closed formulas over the links of a cluster, as functions of the bytes per rank.

With p ranks, a time t(m) for a message of m bytes over one hop, and γ seconds to add up a byte, an allreduce of n bytes
takes, by algorithm:

- ring (Patarasuk and Yuan 2009): 2(p-1) t(n/p) + (p-1)/p nγ;
- halving-doubling (Thakur, Rabenseifner and Gropp 2005): 2 Σ t(n/2^k) for k = 1 … log₂p, + (p-1)/p nγ; ranks beyond a
  power of two first send theirs to a neighbour and receive the sum at the end, which adds 2 t(n) + nγ;
- tree (two binary trees at once, Sanders, Speck and Träff 2009, as in NCCL): 2⌈log₂p⌉ latencies, 2n through the
  slowest link;
- hierarchical (Jia et al. 2018), as hvdkit implements it: a ring within each host, a ring over the first ranks of the
  hosts, a broadcast within each host;
- memory, which takes the ring's place where the k ranks of a host share it: 2 t((k-1)/k n), as a rank gives the others
  (k-1)/k n in one exchange to reduce and takes as much in another; between h hosts, k rings of h ranks have n/k each,
  so that 2(h-1)/h n leave a host;
- central (a parameter server): every rank sends n to one rank and receives n, (p-1)n in and out of its links; several
  servers share the tensors, each of which is on one of them (`balanced_servers`).

An allgather takes (p-1) t(n), an all-to-all (p-1) t(n/p), a reduce-scatter half of a ring allreduce, a broadcast half
of a tree.

On a path over several levels of links, latencies add up and the lowest rate counts. Flows that leave a group over the
same links share them.

A measurement of the same operation over the same ranks takes precedence over all formulas. For other numbers of ranks,
latencies and rates of a measured ring change as the formula's do, and between two measured numbers lie between them;
sizes at which a protocol switches stay. Where a measurement cannot be resolved into hops, the formula is scaled so that
it agrees with the measured latency and asymptotic rate. All costs rise with the bytes, and have jumps only where a
measured protocol has them. Over more ranks none takes less, but halving-doubling over a power of two.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from hvdkit.simulator import measured_costs, piecewise_linear
from hvdkit.simulator.cluster import Cluster, Level, Measured, Operation, Way
from hvdkit.simulator.piecewise_linear import ZERO, PiecewiseLinear, ray

PER_DOUBLING = 5.0  # percent of error for each doubling of ranks away from measured ones, between two of them
# The same beyond them. From 2 nodes to 4, nine tenths of 266 published allreduces (benchmarks/anchors, OSU) are within
# 84 % of the prediction; from 2 and 4 to 8 nodes the mean error of another log was 32 %.
BEYOND_ONE, BEYOND_SEVERAL, MOST_BEYOND = 85.0, 45.0, 300.0


@dataclass(frozen=True)
class CollectiveCost:
    """The time of a collective (`line`, by bytes per rank), the algorithms it may use, and its expected error."""

    line: PiecewiseLinear
    algorithm: str
    residual_percent: float
    warnings: tuple[str, ...] = ()


def balanced_servers(sizes: Iterable[float], servers: int) -> float:
    """How many evenly loaded servers would be as fast as `servers` that have whole tensors of these `sizes`.

    Each tensor goes to the server with the least bytes, in order, as TensorFlow's GreedyLoadBalancingStrategy places
    variables. All ranks wait for the busiest server.
    """
    loads = [0.0] * servers
    for size in sizes:
        heapq.heapreplace(loads, loads[0] + size)
    return sum(loads) / max(loads) if max(loads) > 0 else float(servers)


@dataclass(frozen=True, eq=False)
class ClusterLinks:
    """The links of a cluster that `ranks` ranks use.

    Each host is filled before the next, unless the ranks are spread over so many `hosts` as evenly as possible.
    """

    cluster: Cluster
    ranks: int
    hosts: int | None = None

    @lru_cache(maxsize=4096)  # noqa: B019 - of all networks together; each of them keeps its costs
    def of_ranks(self, ranks: int) -> ClusterLinks:
        """The same links, used by so many ranks."""
        return replace(self, ranks=ranks)

    @property
    def hosts_used(self) -> int:
        """How many hosts the ranks are on."""
        fewest = -(-self.ranks // self.cluster.ranks_per_host)
        return max(fewest, min(self.hosts or fewest, self.ranks))

    @property
    def local(self) -> int:
        """The ranks on the host that has the most."""
        filled = min(self.cluster.ranks_per_host, self.ranks)
        return -(-self.ranks // self.hosts_used) if self.hosts else filled

    @cached_property
    def levels(self) -> list[tuple[Level, int]]:
        """The levels in use, innermost first, each with how many groups of the level below it connects."""
        used, below, slots = [], 1, self.cluster.ranks_per_host
        for level in self.cluster.levels:
            reach = self.ranks
            if level.kind == "memory" and len(self.cluster.levels) > 1:
                # Where hosts have unequal numbers of ranks, Horovod's talk through sockets alone.
                reach = self.local if self.local * self.hosts_used == self.ranks else 1
            elif level.ranks is not None and level.ranks <= slots:
                reach = min(level.ranks, self.local)
            elif level.ranks is not None:
                reach = min(level.ranks if not self.hosts else level.ranks // slots * self.local, self.ranks)
            if reach > below:
                used.append((level, -(-reach // below)))
            below = max(below, reach)
            if reach == self.ranks:
                break
        return used

    @property
    def in_memory(self) -> bool:
        """Whether the ranks of a host exchange tensors through memory."""
        return bool(self.levels) and self.levels[0][0].kind == "memory"

    @property
    def negotiation_s(self) -> float:
        """How long Horovod's ranks take to agree in a cycle."""
        software = self.cluster.software
        more = software.negotiation_us_per_rank * self.ranks
        more += software.negotiation_us_per_doubling * math.log2(self.ranks)
        return 1e-6 * (software.negotiation_us + more)

    @lru_cache(maxsize=4096)  # noqa: B019 - of all networks together
    def cost(self, operation: Operation, algorithm: Way | None = None, servers: float = 1) -> CollectiveCost:
        """The cost of an operation, with the fastest of the library's algorithms unless one is given."""
        if self.ranks == 1:
            return CollectiveCost(ZERO, "none", 0.0)
        for measured in self._measurements(operation, algorithm):
            if (measured.ranks, measured.ranks_per_host) == (self.ranks, self.local):
                return CollectiveCost(measured_costs.line_of(measured), measured.algorithm, measured.residual_percent)
        line, name = self._formula(operation, algorithm, servers)
        line = piecewise_linear.rising(self._agreeing(line, operation, algorithm))
        if operation == "allreduce" and name == "tree" and (fewer := self._fewer_measured()):
            line = piecewise_linear.greatest([line, fewer.cost(operation, algorithm, servers).line])
        return CollectiveCost(line, name, *self._expected_error(operation, algorithm))

    def _formula(self, operation: Operation, algorithm: Way | None, servers: float) -> tuple[PiecewiseLinear, str]:
        """The time over the links, and the name of the algorithm."""
        ring = "memory" if self.in_memory else "ring"
        if operation == "broadcast" and not self.in_memory:
            return self._hop_of_ring().pipelined(sum(self._tree_depths)), ring
        if operation == "alltoall":
            return self._alltoall(), ring
        if operation != "allreduce":
            return self._ring(operation), ring
        names: list[Way] = [algorithm] if algorithm else [*self.cluster.software.algorithms]
        line = piecewise_linear.least([self._allreduce(name, servers) for name in names])
        shown = [ring if name == "ring" else name for name in names]
        return line, shown[0] if len(shown) == 1 else "fastest of " + ", ".join(shown)

    def hierarchical(self) -> tuple[PiecewiseLinear, PiecewiseLinear, PiecewiseLinear]:
        """The parts of a hierarchical allreduce: within hosts, between their first ranks, and back within hosts."""
        if len(self.levels) < 2:
            return self._hop_of_ring().repeated(*measured_costs.ring_exchanges("allreduce", self.ranks)), ZERO, ZERO
        local, near = self._size(0), self._hop(0, 1.0)
        hosts = -(-self.ranks // local)
        inside = near.repeated(*measured_costs.exchanges("allreduce", local, "memory" if self.in_memory else "ring"))
        between = self._path(range(1, len(self.levels)), flows=1.0).repeated(2 * (hosts - 1), 1 / hosts)
        depth = 1 if self.in_memory else math.ceil(math.log2(local))
        return (
            inside + self._summing((local - 1) / local),
            between + self._summing((hosts - 1) / hosts),
            near.pipelined(depth),
        )

    def _allreduce(self, algorithm: str, servers: float) -> PiecewiseLinear:
        if algorithm in ("ring", "memory"):
            return self._ring("allreduce")
        if algorithm == "halving-doubling":
            return self._halving_doubling()
        if algorithm == "tree":
            depth = sum(self._tree_depths)
            hops = [self._hop(i, 1.0) for i in range(len(self.levels))]
            path = piecewise_linear.bottleneck(hops, [tree_depth / depth for tree_depth in self._tree_depths])
            return path.pipelined(depth).times(2) + self._summing(1.0)
        if algorithm == "hierarchical":
            return piecewise_linear.total(self.hierarchical())
        # central: one after the other through the servers' links, at most one server a host; ranks of a server's own
        # host use other links meanwhile
        local, servers = self._near_server, min(servers, self.most_servers)
        far = self._hop(len(self.levels) - 1, 1.0).repeated(2, (self.ranks - local) / servers)
        near = self._hop(0, 1.0).repeated(2, local - 1) if local > 1 else ZERO
        return piecewise_linear.greatest([near, far]) + self._summing((self.ranks - 1) / servers)

    @property
    def most_servers(self) -> int:
        """One a host."""
        return self.ranks // self._near_server

    @property
    def _near_server(self) -> int:
        """The ranks on a server's own host."""
        return self._size(0) if len(self.levels) > 1 else 1

    def _ring(self, operation: Operation) -> PiecewiseLinear:
        steps = measured_costs.ring_exchanges(operation, self.ranks)
        line = self._through_memory(operation) if self.in_memory else self._hop_of_ring().repeated(*steps)
        sums = operation in ("allreduce", "reducescatter")
        return line + self._summing((self.ranks - 1) / self.ranks) if sums else line

    def _through_memory(self, operation: Operation) -> PiecewiseLinear:
        """Within each host through memory, and between hosts by rings of the ranks that have the same part."""
        local, near = self._size(0), self._hop(0, 1.0)
        times, share = measured_costs.exchanges(operation, local, "memory")
        if len(self.levels) == 1:
            return near.repeated(times, share)
        hosts = self.ranks // local
        if operation == "broadcast":  # one rank of a host hands all on to the next host's
            return near + self._path(range(1, len(self.levels)), flows=1.0).pipelined(hosts - 1)
        messages, part = measured_costs.ring_exchanges(operation, hosts)
        if operation == "allgather":
            share *= hosts
        else:
            part /= local
        between = self._path(range(1, len(self.levels)), flows=local)
        return near.repeated(times, share) + between.repeated(messages, part)

    def _alltoall(self) -> PiecewiseLinear:
        if len(self.levels) == 1:
            return self._ring("alltoall")
        # All ranks of a host send over its links at once; only what stays within the host does not use them.
        local = self._size(0)
        outside = (self.ranks - local) / (self.ranks - 1)
        # Ranks that share memory take sockets for it all the same.
        path = self._path(range(int(self.in_memory), len(self.levels)), flows=local * outside)
        return path.repeated(*measured_costs.ring_exchanges("alltoall", self.ranks))

    def _halving_doubling(self) -> PiecewiseLinear:
        power = 2 ** int(math.log2(self.ranks))
        steps, distance = [], 1
        while distance < power:
            level = next(i for i in range(len(self.levels)) if distance < self._size(i) or i == len(self.levels) - 1)
            # The nearest ranks exchange the largest halves. All ranks of a group leave it at the same time.
            flows = 1.0 if level == 0 else float(min(self._size(level - 1), distance))
            steps.append(self._hop(level, flows).repeated(2, 1 / (2 * distance)))
            distance *= 2
        beyond = self.ranks > power
        if beyond:
            steps.append(self._hop_of_ring().repeated(2, 1.0))
        return piecewise_linear.total([*steps, self._summing((power - 1) / power + beyond)])

    def _hop_of_ring(self) -> PiecewiseLinear:
        return self._path(range(len(self.levels)), flows=1.0)

    def _path(self, indices: range, flows: float) -> PiecewiseLinear:
        """One step in which messages cross all these levels at once; `flows` leave each group above the first level."""
        hops = [self._hop(i, flows if i > 0 else 1.0) for i in indices]
        if len(hops) == 1:
            return hops[0]
        # Of all hops round a ring, most stay within a group of the lower level.
        crossing = [self.ranks / (self._size(i - 1) if i else 1) for i in indices]
        counts = [here - above for here, above in zip(crossing, [*crossing[1:], 0.0], strict=True)]
        return piecewise_linear.bottleneck(hops, [count / sum(counts) for count in counts])

    def _hop(self, index: int, flows: float) -> PiecewiseLinear:
        level, groups = self.levels[index]
        line = self._measured_hop(index)
        if line is None:
            line = piecewise_linear.of_pieces(level.pieces).slowed(level.crowded(groups))
        shared = max(flows, 1.0) / level.ports * level.oversubscription / (1 - level.busy)
        return piecewise_linear.rising(line.slowed(shared))

    def _size(self, index: int) -> int:
        """The number of ranks in a group of this level."""
        return min(math.prod(groups for _, groups in self.levels[: index + 1]), self.ranks)

    @cached_property
    def _tree_depths(self) -> list[int]:
        """By level, the depth of NCCL's trees, which are chains within a host."""
        chain = len(self.levels) > 1
        return [
            groups - 1 if index == 0 and chain else math.ceil(math.log2(groups))
            for index, (_, groups) in enumerate(self.levels)
        ]

    def _summing(self, share: float) -> PiecewiseLinear:
        rate = self.cluster.software.reduction_bytes_per_s
        return ray(share / rate) if rate else ZERO

    def _measurements(self, operation: Operation, algorithm: Way | None) -> Sequence[Measured]:
        return [m for m in self.cluster.measured if m.operation == operation and algorithm in (None, m.algorithm)]

    def _nearest(self, measured: Sequence[Measured]) -> tuple[float, Measured] | None:
        """The measurement with the nearest number of ranks, and how many doublings lie between; None without any."""
        distances = [abs(math.log2(m.ranks / self.ranks)) for m in measured]
        return min(zip(distances, measured, strict=True), key=lambda pair: pair[0], default=None)

    def _in_hops(self, index: int) -> list[Measured]:
        """The allreduces that were measured over one level alone, so that they say what a hop of it takes."""
        if self.cluster.levels[index].kind == "memory":
            return [m for m in self._measurements("allreduce", "memory") if m.ranks == m.ranks_per_host]
        last, only = index == len(self.cluster.levels) - 1, len(self.cluster.levels) == 1
        return [
            m
            for m in self._measurements("allreduce", "ring")
            if only or (m.ranks_per_host == 1 if last else index == 0 and m.ranks == m.ranks_per_host)
        ]

    def _fewer_measured(self) -> ClusterLinks | None:
        """The next fewer ranks over which a hop was measured, where there is one level of links.

        A hop that was measured over more ranks may be faster, and a tree has hardly more of them.
        """
        if len(self.cluster.levels) > 1:
            return None
        counts = [m.ranks for m in self._in_hops(0) if m.ranks < self.ranks]
        return ClusterLinks(self.cluster, max(counts)) if counts else None

    def _measured_hop(self, index: int) -> PiecewiseLinear | None:
        """One hop of a level, interpolated between the numbers of ranks that were measured; None without any."""
        level_index = self.cluster.levels.index(self.levels[index][0])
        known = sorted(self._in_hops(level_index), key=lambda m: m.ranks)
        if not known:
            return None
        ranks = self.local if level_index == 0 and len(self.cluster.levels) > 1 else self.ranks
        if index > 0 and self.in_memory:
            ranks //= self._size(0)
        between = self.levels[index][0]
        lines = [measured_costs.over(m, ranks).slowed(between.crowded(ranks) / between.crowded(m.ranks)) for m in known]
        times, share = measured_costs.exchanges("allreduce", ranks, known[0].algorithm)
        return measured_costs.combined(known, lines, ranks).repeated(1 / times, 1 / share)

    def _agreeing(self, line: PiecewiseLinear, operation: Operation, algorithm: Way | None) -> PiecewiseLinear:
        """A formula's `line`, made to agree with measurements that do not say what a hop takes.

        Between two numbers of ranks the measured times are interpolated as the formula's latencies grow.
        """
        hops = [m for index in range(len(self.cluster.levels)) for m in self._in_hops(index)]
        nearest = self._nearest([m for m in self._measurements(operation, algorithm) if m not in hops])
        if nearest is None:
            return line
        alike = [
            m
            for m in self._measurements(operation, nearest[1].algorithm)
            if m not in hops and (m.ranks_per_host == nearest[1].ranks_per_host)
        ]
        below = max((m for m in alike if m.ranks < self.ranks), key=lambda m: m.ranks, default=None)
        above = min((m for m in alike if m.ranks > self.ranks), key=lambda m: m.ranks, default=None)
        if below is None or above is None:
            scaled, known = self._scaled(line, below or above or nearest[1], hops), below or above
            bound = piecewise_linear.greatest if below else piecewise_linear.least
            return bound([scaled, measured_costs.line_of(known)]) if known else scaled
        small = float(max(below.smallest_bytes, above.smallest_bytes, 1))
        ends = [float(self._formula_of(m, hops)(small)) for m in (below, above)]
        grown = (float(line(small)) - ends[0]) / (ends[1] - ends[0]) if ends[1] > ends[0] else 0.0
        weight = min(1.0, max(0.0, grown))
        return measured_costs.line_of(below).times(1 - weight) + measured_costs.line_of(above).times(weight)

    def _formula_of(self, measured: Measured, hops: list[Measured]) -> PiecewiseLinear:
        """What the formula has for what was measured."""
        bare = self.cluster.model_copy(update={"measured": hops, "ranks_per_host": measured.ranks_per_host})
        return ClusterLinks(bare, measured.ranks)._formula(measured.operation, measured.algorithm, 1)[0]

    def _scaled(self, line: PiecewiseLinear, measured: Measured, hops: list[Measured]) -> PiecewiseLinear:
        """A formula's `line`, by the measured latency and asymptotic rate over the formula's own there."""
        formula = self._formula_of(measured, hops)
        known, small = measured_costs.line_of(measured), max(1.0, float(measured.smallest_bytes))
        latency = float(known(small)) / max(float(formula(small)), 1e-15)
        rate = known.slope[-1] / max(formula.slope[-1], 1e-24)
        return line.slowed(rate / latency).times(latency) if rate > 0 < latency else line

    def _expected_error(self, operation: Operation, algorithm: Way | None) -> tuple[float, tuple[str, ...]]:
        """The expected error in percent, and the warnings that explain it."""
        nearest = self._nearest(self._measurements(operation, algorithm) or self._measurements("allreduce", None))
        if nearest is None:
            return self.cluster.residual_percent + PER_DOUBLING * math.log2(self.ranks / 2), ()
        far, measured = nearest
        warning = f"{operation} over {self.ranks} ranks is extrapolated from {measured.operation} over {measured.ranks}"
        known = {m.ranks for m in self._measurements(measured.operation, None)}
        if self.ranks > max(known):
            beyond = (BEYOND_ONE if len(known) == 1 else BEYOND_SEVERAL) * far
            return measured.residual_percent + min(MOST_BEYOND, max(PER_DOUBLING, beyond)), (warning,)
        return measured.residual_percent + PER_DOUBLING * max(1.0, far), (warning,)
