"""The proof that a runtime works: two real processes reduce, gather and broadcast, and check what came of it.

`prove` starts them; each is `python -m hvdkit.runtimes.proof FRAMEWORK DEVICE`, which ends with status 1 and one line
on a wrong result. All numbers are small integers, so that every sum is exact in float32 whatever its order.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hvdkit.errors import HvdkitError, RunError
from hvdkit.launch import direct
from hvdkit.launch.hosts import parse_hosts
from hvdkit.launch.job import Job
from hvdkit.runtimes import machine

if TYPE_CHECKING:
    from hvdkit.core.adapter import Adapter
    from hvdkit.runtimes.store import Runtime

RANKS = 2


def prove(runtime: Runtime, framework: str, on_tick: Callable[[], None] | None = None) -> None:
    """Run the proof of `framework` in `runtime`. Raises RunError, with the failing rank's output, where it fails.

    `on_tick` is called ten times a second; what it raises ends the proof.
    """
    # NCCL refuses two ranks on one GPU, so that a machine with a single one proves the host's side only.
    device = "gpu" if runtime.gpu and len(machine.gpus()) >= RANKS else "cpu"
    with tempfile.TemporaryDirectory(prefix="hvdkit-proof-") as folder:
        job = Job(
            python=runtime.python,
            arguments=["-m", "hvdkit.runtimes.proof", framework, device],
            np=RANKS,
            hosts=parse_hosts(None, RANKS),
            environment={**runtime.environment, "OMP_NUM_THREADS": "1"},
            log_dir=Path(folder),
        )
        direct.run(job, on_tick)


def check(adapter: Adapter, rank: int, size: int) -> None:
    """Reduce, gather and broadcast over all ranks. Raises RunError where a result is not exactly what it must be."""
    ranks = np.arange(size, dtype=np.float32)
    own = [np.full((3, 2), rank + 1, np.float32), np.arange(5, dtype=np.float32) * rank]
    sums = adapter.allreduce([adapter.from_numpy(array) for array in own], op="sum", name="proof.reduce")
    _compare("allreduce", rank, adapter.to_numpy(sums[0]), np.full((3, 2), (ranks + 1).sum(), np.float32))
    _compare("allreduce", rank, adapter.to_numpy(sums[1]), np.arange(5, dtype=np.float32) * ranks.sum())

    # Rank r brings r + 1 rows: gathering pieces of unequal length is where a binding is most easily wrong.
    rows = adapter.allgather(adapter.from_numpy(np.full((rank + 1, 2), rank, np.float32)), name="proof.gather")
    expected = np.concatenate([np.full((int(other) + 1, 2), other, np.float32) for other in ranks])
    _compare("allgather", rank, adapter.to_numpy(rows), expected)

    last = size - 1
    sent = adapter.broadcast(adapter.from_numpy(np.full(4, rank + 7, np.float32)), last, name="proof.broadcast")
    _compare("broadcast", rank, adapter.to_numpy(sent), np.full(4, last + 7, np.float32))


def _compare(collective: str, rank: int, got: np.ndarray, expected: np.ndarray) -> None:
    if got.shape != expected.shape or not np.array_equal(got, expected):
        raise RunError(
            f"{collective} on rank {rank} gave {got.tolist()} of shape {got.shape}, "
            f"expected {expected.tolist()} of shape {expected.shape}: this Horovod must not be used"
        )


def main(arguments: list[str]) -> int:
    """One rank of the proof; its exit status."""
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
