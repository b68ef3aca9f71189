"""The schema of `bench.json`: how long a collective takes by size."""

from __future__ import annotations

from typing import Any, Literal, get_args

from hvdkit.results.json_files import Record, Result
from hvdkit.results.machine import Machine

Collective = Literal["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Redop = Literal["sum", "average", "min", "max"]
Dtype = Literal["float16", "float32", "float64", "int32", "int64", "uint8", "int8"]
DTYPES: dict[Dtype, int] = {  # bytes an element
    "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "uint8": 1, "int8": 1,
}  # fmt: skip


class BenchSpec(Record):
    """What the ranks measure. Sizes are as in `BenchRow`, each a multiple of `step_bytes`."""

    collective: Collective
    dtype: Dtype
    redop: Redop
    sizes_bytes: list[int]
    seconds: float  # to spend on a size
    device: str = "cpu"


class BenchRow(Record):
    """One size of a collective, with the columns of nccl-tests.

    `size` and `count` (elements) are of the whole tensor: a rank's input of allreduce, broadcast, alltoall and
    reducescatter, and its output of allgather. The time of a repeat is its slowest rank's, from a start that all ranks
    wait for; `time_us` is the mean. `algbw_mbit_per_s` is size ÷ `time_us`, `busbw_mbit_per_s` is that times
    `bus_factor`: what a link carries in each direction. `wrong` counts the wrong elements of all ranks in the first and
    the last repeat. `of_link` is the bus bandwidth as a share of the link's rate, if that is known.
    """

    size_bytes: int
    count: int
    dtype: str
    redop: str
    time_us: float
    p50_us: float
    p95_us: float
    p99_us: float
    algbw_mbit_per_s: float
    busbw_mbit_per_s: float
    of_link: float | None = None
    repeats: int
    wrong: int


class Bench(Record, Result, file="bench.json"):
    """`bench.json`. `hosts` are listed by rank, `settings` are rank 0's HOROVOD_… variables.

    `memory_bytes_per_s` is what a rank on a CPU reads and writes in copies while all ranks copy; None if unknown.
    `algorithm` is `memory` where `shared_memory_ranks` of a host (None: unknown) exchange bytes through it, else the
    allreduce's (Gloo uses a ring); it is `ring` for other collectives and libraries too.
    """

    collective: Collective
    framework: str
    framework_version: str
    horovod_version: str | None
    hvdkit_version: str
    np: int
    hosts: list[str]
    device: str
    algorithm: Literal["ring", "halving-doubling", "memory"]
    shared_memory_ranks: int | None = None
    link_mbit_per_s: float | None
    memory_bytes_per_s: float | None = None
    settings: dict[str, str]
    rows: list[BenchRow]
    machine: Machine

    def records(self) -> list[dict[str, Any]]:
        """A row for each size."""
        fixed = {"collective": self.collective, "framework": self.framework, "np": self.np}
        return [fixed | row.model_dump() for row in self.rows]


def step_bytes(collective: Collective, dtype: Dtype, np: int) -> int:
    """The unit of sizes: one element, or one per rank if the collective splits the tensor between ranks."""
    return DTYPES[dtype] * (np if collective in ("allgather", "alltoall", "reducescatter") else 1)
