"""How long collectives take: closed formulas over a cluster's links, as piecewise lines over the bytes a rank puts in.

With p ranks, hops of time t(m) for m bytes, and γ seconds to add up a byte:

- ring (Patarasuk and Yuan 2009): 2(p-1) t(n/p) + (p-1)/p nγ;
- halving-doubling (Thakur, Rabenseifner and Gropp 2005): 2 Σ t(n/2^k) for k = 1 … log₂p, + (p-1)/p nγ; ranks beyond a
  power of two first hand theirs to a neighbour and get the sum at the end, 2 t(n) + nγ;
- tree (two binary trees at once, Sanders, Speck and Träff 2009, as NCCL has it): 2⌈log₂p⌉ latencies, 2n through the
  slowest link;
- hierarchical (Jia et al. 2018), as hvdkit has it: a ring in each host, a ring of the hosts' first ranks, a broadcast
  in each host;
- central: every rank sends all to one and gets all back (a parameter server), (p-1)n in and out of its links;
- allgather (p-1) t(k), all-to-all (p-1) t(n/p), reduce-scatter half a ring, broadcast the half of a tree.

Latencies add up along a path over several levels of links; the slowest level's rate counts. Flows that leave a group by
the same links share them. Where the operation was measured over the same ranks, the measured line is taken.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from hvdkit.simulator import lines
from hvdkit.simulator.cluster import Algorithm, Cluster, Level, Measured, Operation, Piece
from hvdkit.simulator.lines import Line

_PER_DOUBLING = 5.0  # percent that a cost is believed less for each doubling of ranks beyond what was measured


@dataclass(frozen=True)
class Cost:
    """A collective's line, by which algorithms it may run, and how far it is believed off (percent); why, if more."""

    line: Line
    algorithm: str
    residual_percent: float
    warnings: tuple[str, ...] = ()


def hop_pieces(measured: Measured) -> list[Piece]:
    """What one message to a neighbour takes, for the time of a whole ring to come out as it was measured.

    The inverse of the formulas above: t(m) = T(pm) / 2(p-1) of an allreduce, with the adding up in it.
    """
    times, part = _steps(measured.operation, measured.ranks)
    return [
        Piece(
            from_bytes=round(piece.from_bytes * part),
            latency_us=piece.latency_us / times,
            mbit_per_s=piece.mbit_per_s * times * part,
        )
        for piece in measured.pieces
    ]


@dataclass(frozen=True, eq=False)
class Network:
    """The links of a cluster that `ranks` ranks use, placed host by host."""

    cluster: Cluster
    ranks: int
    _known: dict[tuple[str, str | None, int], Cost] = field(default_factory=dict)

    @cached_property
    def levels(self) -> list[tuple[Level, int]]:
        """The levels in use, from the inside, each with how many groups of the level below it joins."""
        used, below = [], 1
        for level in self.cluster.levels:
            reach = self.ranks if level.ranks is None else min(level.ranks, self.ranks)
            if reach > below:
                used.append((level, -(-reach // below)))
            below = max(below, reach)
            if reach == self.ranks:
                break
        return used

    def cost(self, operation: Operation, algorithm: Algorithm | None = None, servers: int = 1) -> Cost:
        """What an operation costs; the fastest of the library's algorithms, unless one is named."""
        key = (operation, algorithm, servers)
        if key not in self._known:
            self._known[key] = self._cost(operation, algorithm, servers)
        return self._known[key]

    def _cost(self, operation: Operation, algorithm: Algorithm | None, servers: int) -> Cost:
        if self.ranks == 1:
            return Cost(lines.ZERO, "none", 0.0)
        cluster = self.cluster
        direct = [m for m in self._measurements(operation, algorithm) if self._same(m)]
        if direct:
            return Cost(lines.of_pieces(direct[0].pieces), direct[0].algorithm, direct[0].residual_percent)
        if operation != "allreduce":
            return Cost(self._other(operation), "ring", *self._belief(operation, algorithm))
        names = [algorithm] if algorithm else list(cluster.software.algorithms)
        each = [self._allreduce(name, servers) for name in names]
        name = names[0] if len(names) == 1 else "fastest of " + ", ".join(names)
        return Cost(lines.least(each), name, *self._belief(operation, algorithm))

    def hierarchical(self) -> tuple[Line, Line, Line]:
        """The parts of a hierarchical allreduce: inside hosts, between their first ranks, and back within hosts."""
        if len(self.levels) < 2:
            return self._ring(self.ranks, 1.0), lines.ZERO, lines.ZERO
        local, near = self._size(0), self._hop(0, 1.0)
        hosts = self.ranks / local
        inside = near.repeated(2 * (local - 1), 1 / local)
        between = self._path(range(1, len(self.levels)), flows=1.0).repeated(2 * (hosts - 1), 1 / hosts)
        depth = math.ceil(math.log2(local))
        return (
            lines.total([inside, self._adding((local - 1) / local)]),
            lines.total([between, self._adding((hosts - 1) / hosts)]),
            Line(near.starts, near.latency * depth, near.slope),
        )

    def _allreduce(self, algorithm: str, servers: int) -> Line:
        p = self.ranks
        if algorithm == "ring":
            return lines.total([self._ring(p, 1.0), self._adding((p - 1) / p)])
        if algorithm == "halving-doubling":
            return self._halving()
        if algorithm == "tree":
            depth = sum(self._tree_depth(i) for i in range(len(self.levels)))
            shares = [self._tree_depth(i) / depth for i in range(len(self.levels))]
            path = lines.bottleneck([self._hop(i, 1.0) for i in range(len(self.levels))], shares)
            return lines.total([Line(path.starts, path.latency * 2 * depth, path.slope * 2), self._adding(1.0)])
        if algorithm == "hierarchical":
            return lines.total(list(self.hierarchical()))
        # central: in turn through the server's links, from within the host and from outside at once
        local = self._size(0) if len(self.levels) > 1 else 1
        flows = max(1, p - local) / servers
        link = self._hop(len(self.levels) - 1, 1.0)
        return lines.total([link.repeated(2, flows), self._adding((p - 1) / servers)])

    def _other(self, operation: Operation) -> Line:
        p = self.ranks
        if operation == "broadcast":
            depth = sum(self._tree_depth(i) for i in range(len(self.levels)))
            path = self._ring_hop()
            return Line(path.starts, path.latency * depth, path.slope)
        times, part = _steps(operation, p)
        if operation == "alltoall" and len(self.levels) > 1:
            # all ranks of a host send by its links at once; only what stays in the host is spared
            local = self._size(0)
            outside = (p - local) / (p - 1)
            return self._path(range(len(self.levels)), flows=local * outside).repeated(times, part)
        line = self._ring_hop().repeated(times, part)
        return lines.total([line, self._adding((p - 1) / p)]) if operation == "reducescatter" else line

    def _halving(self) -> Line:
        whole = 2 ** int(math.log2(self.ranks))
        steps, distance = [], 1
        while distance < whole:
            level = next(i for i in range(len(self.levels)) if distance < self._size(i) or i == len(self.levels) - 1)
            # the near exchange the large halves; those that leave a group leave it all at once
            flows = 1.0 if level == 0 else float(min(self._size(level - 1), distance))
            steps.append(self._path(range(level, level + 1), flows).repeated(2, 1 / (2 * distance)))
            distance *= 2
        rest = self.ranks - whole
        if rest:
            steps.append(self._ring_hop().repeated(2, 1.0))
        return lines.total([*steps, self._adding((whole - 1) / whole + (1 if rest else 0))])

    def _ring(self, ranks: int, part: float) -> Line:
        return self._ring_hop().repeated(2 * (ranks - 1), part / ranks)

    def _ring_hop(self) -> Line:
        return self._path(range(len(self.levels)), flows=1.0)

    def _path(self, indices: range, flows: float) -> Line:
        """One step of messages that go on at all levels at once; `flows` leave each group above the first level."""
        hops = [self._hop(i, flows if i > 0 else 1.0) for i in indices]
        if len(hops) == 1:
            return hops[0]
        # of all hops round a ring, those that stay within the lower level are the most
        crossing = [self.ranks / (self._size(i - 1) if i else 1) for i in indices]
        counts = [here - above for here, above in zip(crossing, [*crossing[1:], 0.0], strict=True)]
        return lines.bottleneck(hops, [count / sum(counts) for count in counts])

    def _hop(self, index: int, flows: float) -> Line:
        level, _ = self.levels[index]
        pieces = self._from_measured(index) or level.pieces
        line = lines.of_pieces(pieces)
        return line.slowed(max(flows, 1.0) / level.ports * level.oversubscription / (1 - level.busy))

    def _size(self, index: int) -> int:
        """Ranks within a group of this level."""
        size = 1
        for _, groups in self.levels[: index + 1]:
            size *= groups
        return min(size, self.ranks)

    def _tree_depth(self, index: int) -> int:
        groups = self.levels[index][1]
        # within a host NCCL's trees are chains
        return groups - 1 if index == 0 and len(self.levels) > 1 else math.ceil(math.log2(groups))

    def _adding(self, part: float) -> Line:
        rate = self.cluster.software.reduction_bytes_per_s
        return lines.per_byte(part / rate) if rate else lines.ZERO

    def _measurements(self, operation: Operation, algorithm: Algorithm | None) -> Sequence[Measured]:
        return [m for m in self.cluster.measured if m.operation == operation and algorithm in (None, m.algorithm)]

    def _same(self, measured: Measured) -> bool:
        local = min(self.cluster.ranks_per_host, self.ranks)
        return measured.ranks == self.ranks and measured.ranks_per_host == local

    def _from_measured(self, index: int) -> list[Piece] | None:
        """A level's hop out of the nearest allreduce that was measured over this level alone."""
        last, only = index == len(self.cluster.levels) - 1, len(self.cluster.levels) == 1
        alone = [
            m
            for m in self.cluster.measured
            if (m.operation, m.algorithm) == ("allreduce", "ring")
            and (only or (m.ranks_per_host == 1 if last else index == 0 and m.ranks == m.ranks_per_host))
        ]
        nearest = min(alone, key=lambda m: abs(math.log2(m.ranks / self.ranks)), default=None)
        return hop_pieces(nearest) if nearest else None

    def _belief(self, operation: Operation, algorithm: Algorithm | None) -> tuple[float, tuple[str, ...]]:
        measured = self._measurements(operation, algorithm) or self._measurements("allreduce", None)
        if not measured:
            return self.cluster.residual_percent, ()
        nearest = min(measured, key=lambda m: abs(math.log2(m.ranks / self.ranks)))
        far = abs(math.log2(nearest.ranks / self.ranks))
        told = f"{operation} over {self.ranks} ranks is extrapolated from {nearest.operation} over {nearest.ranks}"
        return nearest.residual_percent + _PER_DOUBLING * max(1.0, far), (told,)


def _steps(operation: Operation, ranks: int) -> tuple[float, float]:
    """(messages one after the other, each what part of the bytes that a rank puts in) of a ring."""
    if operation == "allreduce":
        return 2.0 * (ranks - 1), 1 / ranks
    if operation == "allgather":
        return ranks - 1.0, 1.0
    if operation == "broadcast":
        return 1.0, 1.0
    return ranks - 1.0, 1 / ranks
