"""One rank of a runtime's self-test: allreduce, allgather and broadcast, with every element of the results checked.

    python -m hvdkit.worker.proof FRAMEWORK DEVICE

A wrong result ends it with status 1 and one line. All values are small integers, so that every sum is exact in float32
in any order.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.core.group import Group
from hvdkit.errors import HvdkitError, RunError

if TYPE_CHECKING:
    from hvdkit.core.seam import Adapter

RANKS = 2


def check(adapter: Adapter, rank: int, size: int) -> None:
    """Allreduce, allgather and broadcast over all ranks. Raises RunError if a result is not exactly as expected."""
    ranks, world = np.arange(size, dtype=np.float32), Group(tuple(range(size)), rank)
    own = [np.full((3, 2), rank + 1, np.float32), np.arange(5, dtype=np.float32) * rank]
    sums = adapter.allreduce([adapter.from_numpy(array) for array in own], world, op="sum", name="proof.reduce")
    _compare("allreduce", rank, adapter.to_numpy(sums[0]), np.full((3, 2), (ranks + 1).sum(), np.float32))
    _compare("allreduce", rank, adapter.to_numpy(sums[1]), np.arange(5, dtype=np.float32) * ranks.sum())

    # Rank r contributes r + 1 rows: unequal lengths are where bindings fail most often.
    rows = adapter.allgather(adapter.from_numpy(np.full((rank + 1, 2), rank, np.float32)), world, "proof.gather")
    expected = np.concatenate([np.full((int(other) + 1, 2), other, np.float32) for other in ranks])
    _compare("allgather", rank, adapter.to_numpy(rows), expected)

    last = size - 1
    sent = adapter.broadcast(adapter.from_numpy(np.full(4, rank + 7, np.float32)), world, last, "proof.broadcast")
    _compare("broadcast", rank, adapter.to_numpy(sent), np.full(4, last + 7, np.float32))


def _compare(collective: str, rank: int, got: np.ndarray, expected: np.ndarray) -> None:
    if got.shape != expected.shape or not np.array_equal(got, expected):
        raise RunError(
            f"{collective} on rank {rank} gave {got.tolist()} of shape {got.shape}, "
            f"expected {expected.tolist()} of shape {expected.shape}: this Horovod must not be used"
        )


def main(arguments: list[str]) -> int:
    """Run one rank of the test and return its exit status."""
    from hvdkit import adapters

    framework, device = arguments
    adapter = adapters.load(framework)
    try:
        topology = adapter.init(device)
        if topology.size != RANKS:
            raise RunError(f"Horovod runs {topology.size} ranks, expected {RANKS}")
        check(adapter, topology.rank, topology.size)
        adapter.shutdown()
    except HvdkitError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
