"""Bus bandwidth: what a collective asks of a link, so that all of them can be compared with the link's rate."""

from __future__ import annotations

from typing import NamedTuple


class Carried(NamedTuple):
    """What a rank's collectives of one kind have carried: `bytes` that it has put in, in `seconds` of execution, which
    begins when all ranks are ready. Of its `ranks`, `sharing` of this host exchange tensors in memory, 0 if none do."""

    collective: str
    ranks: int
    sharing: int
    operations: int
    bytes: int
    seconds: float


def bus_factor(collective: str, np: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as derived in nccl-tests' PERFORMANCE.md; 1 for other collectives."""
    share = (np - 1) / np
    return {"allreduce": 2 * share, "allgather": share, "reducescatter": share, "alltoall": share}.get(collective, 1.0)


def sent_bytes(operation: str, size: int, ranks: int, lanes: int = 0) -> float:
    """The bytes that the busiest link carries one way for a collective into which each of `ranks` puts `size` bytes.

    It is a ring of the ranks, or of `lanes` hosts whose ranks share memory; 0: they do not.
    """
    places = lanes if lanes > 1 and operation != "alltoall" else ranks
    return bus_factor(operation, places) * float(size * ranks if operation == "allgather" else size)
