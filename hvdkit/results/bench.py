"""The schema of `bench.json`: how long collectives take by size, and what that makes of a network."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict

from hvdkit.results.runs import Machine

Collective = Literal["allreduce", "allgather", "broadcast", "alltoall", "reducescatter"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
Redop = Literal["sum", "average", "min", "max"]
DTYPES = {"float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "uint8": 1, "int8": 1}  # bytes an element


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class BenchRequest(_Record):
    """What the ranks are asked to measure. Sizes are as in `BenchRow`, each a multiple of what `step_bytes` says."""

    collective: Collective
    dtype: str
    redop: Redop
    sizes_bytes: list[int]
    seconds: float  # to spend on a size
    device: str = "cpu"


class BenchRow(_Record):
    """One size of a collective. Columns are nccl-tests': `size` and `count` of elements are of the whole tensor, which
    is a rank's input of allreduce, broadcast, alltoall and reducescatter and its output of allgather.

    Each repeat's time is its slowest rank's, from a start that all ranks wait for. `time_us` is their mean.
    `algbw_mbit_per_s` is size ÷ `time_us`, `busbw_mbit_per_s` that times `bus_factor`: what a link carries in each
    direction. `wrong` counts faulty elements of all ranks, of the first and the last repeat. `of_link` is the bus
    bandwidth as a share of the link's rate, where that is known.
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


class Bench(_Record):
    """`bench.json`. `hosts` are by rank, `settings` Horovod's (HOROVOD_…) that were in force on rank 0.

    `algorithm` is the allreduce's: Gloo's is a ring. Of other collectives and libraries it says ring too.
    """

    collective: Collective
    framework: str
    framework_version: str
    horovod_version: str | None
    hvdkit_version: str
    np: int
    hosts: list[str]
    device: str
    algorithm: Literal["ring", "halving-doubling"]
    link_mbit_per_s: float | None
    settings: dict[str, str]
    rows: list[BenchRow]
    machine: Machine


def bus_factor(collective: Collective, np: int) -> float:
    """What each rank's link has to carry one way, over the size; nccl-tests' PERFORMANCE.md derives it."""
    return {
        "allreduce": 2 * (np - 1) / np,
        "allgather": (np - 1) / np,
        "reducescatter": (np - 1) / np,
        "alltoall": (np - 1) / np,
        "broadcast": 1.0,
    }[collective]


def step_bytes(collective: Collective, dtype: str, np: int) -> int:
    """Sizes are whole multiples of this: an element, or one for each rank where the tensor is cut among them."""
    return DTYPES[dtype] * (np if collective in ("allgather", "alltoall", "reducescatter") else 1)
