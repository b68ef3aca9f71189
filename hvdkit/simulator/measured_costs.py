"""Measured collectives: the hops that they tell of, and their times over other numbers of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from hvdkit.simulator import piecewise_linear
from hvdkit.simulator.cluster import CurvePiece, Level, Measured, Operation
from hvdkit.simulator.piecewise_linear import PiecewiseLinear


def hop_pieces(measured: Measured) -> list[CurvePiece]:
    """The time of one message to a neighbour, from the measured time T of a collective by a ring or through memory.

    The inverse of the formulas above: t(m) = T(pm) / 2(p-1) for an allreduce. The time to add up is part of it.
    """
    times, share = exchanges(measured.operation, measured.ranks, measured.algorithm)
    return [piece.scaled(share, 1 / times, times * share) for piece in measured.pieces]


def level(measured: Measured) -> Level:
    """The links between the ranks, or the memory that they share, by this collective alone."""
    kind: Literal["memory", "link"] = "memory" if measured.algorithm == "memory" else "link"
    return Level(name=kind, kind=kind, pieces=hop_pieces(measured))


def line_of(measured: Measured) -> PiecewiseLinear:
    """The measured times, by bytes."""
    return piecewise_linear.of_measured(measured.pieces, measured.largest_bytes)


def over(measured: Measured, ranks: int) -> PiecewiseLinear:
    """A measured allreduce over another number of ranks, by its formula.

    Latencies grow with the messages, rates change with what a rank sends. Where the library switches its protocol is a
    size of the whole tensor, so it stays: carried over by the size of a message, more ranks took less time.
    """
    line = line_of(measured)
    (times, share), (known, known_share) = (
        exchanges("allreduce", count, measured.algorithm) for count in (ranks, measured.ranks)
    )
    slower = times * share / (known * known_share)
    return PiecewiseLinear(line.starts, line.latency * (times / known), line.slope * slower)


def combined(known: Sequence[Measured], lines: Sequence[PiecewiseLinear], ranks: int) -> PiecewiseLinear:
    """The allreduce over so many ranks, from what each of the `known`, by rising ranks, comes to there (`lines`).

    Beyond the measured numbers it is the nearest's. Between two of them, times a (n - 1) + b (n - 1) / n through both,
    where neither part is negative: so times never fall with the ranks where what was measured does not.
    """
    counts = [m.ranks for m in known]
    if ranks <= counts[0] or ranks >= counts[-1]:
        return lines[0 if ranks <= counts[0] else -1]
    after = next(i for i, count in enumerate(counts) if count >= ranks)
    if counts[after] == ranks:
        return lines[after]
    below, above = known[after - 1], known[after]
    first, last = line_of(below), line_of(above)

    def weight(grown: Callable[[int], float]) -> PiecewiseLinear:
        """Interpolated as `grown` grows with the ranks."""
        here, start, end = grown(ranks), grown(below.ranks), grown(above.ranks)
        part = (here - start) / (end - start)
        return first.times(1 - part) + last.times(part)

    by_bytes = weight(lambda count: (count - 1) / count)
    if below.algorithm == "memory":  # whose latency does not grow
        return by_bytes
    by_latency = weight(lambda count: count - 1)
    # a (n - 1) + b (n - 1) / n = (n - 1) (a + b / n): linear in 1 / n but for the first factor
    part = (1 / ranks - 1 / below.ranks) / (1 / above.ranks - 1 / below.ranks)
    both = first.times((1 - part) * (ranks - 1) / (below.ranks - 1))
    both += last.times(part * (ranks - 1) / (above.ranks - 1))
    low, high = piecewise_linear.least([by_bytes, by_latency]), piecewise_linear.greatest([by_bytes, by_latency])
    return piecewise_linear.greatest([low, piecewise_linear.least([high, both])])


def exchanges(operation: Operation, ranks: int, way: str) -> tuple[float, float]:
    """`ring_exchanges`; or the exchanges through memory, each with what a rank sends in a whole round of the ring."""
    times, share = ring_exchanges(operation, ranks)
    round_of = ranks - 1 if way == "memory" and operation != "broadcast" else 1
    return times / round_of, share * round_of


def ring_exchanges(operation: Operation, ranks: int) -> tuple[float, float]:
    """The messages that a ring sends one after the other, and the fraction of a rank's bytes in each of them."""
    if operation == "allreduce":
        return 2.0 * (ranks - 1), 1 / ranks
    if operation == "allgather":
        return ranks - 1.0, 1.0
    if operation == "broadcast":
        return 1.0, 1.0
    return ranks - 1.0, 1 / ranks
