"""One rank of `hvdkit bench`: time a collective for each size, and check every element of its results.

usage: python -P -m hvdkit.worker.bench FRAMEWORK REQUEST OUT      (REQUEST is JSON)

Rank 0 writes `rows.json` into OUT after each size, and `ranks.json` at the end.

Collectives are those of a training step: allreduce may overwrite its input, and memory is kept from one repeat to the
next.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from hvdkit.core.group import HOST, Group, Topology, world_of
from hvdkit.core.seam import Adapter
from hvdkit.core.tensors import Tensor
from hvdkit.files import write_atomic
from hvdkit.heartbeat import Heartbeat
from hvdkit.results.bench import DTYPES, BenchRow, BenchSpec
from hvdkit.results.bus import bus_factor
from hvdkit.worker import startup
from hvdkit.worker.entry import end_as_rank

ROWS, RANKS = "rows.json", "ranks.json"
_PERIOD = 11  # of the values; not a power of two, so that a tensor's parts differ
_WARMUPS, _WARMUP_S = 5, 0.5  # at most so many warm-up repeats; after the first, only until this time has passed
_FEWEST, _MOST = 3, 2000
_COPIED_BYTES, _COPIES = 32 * 2**20, 15


def measure(
    adapter: Adapter,
    topology: Topology,
    request: BenchSpec,
    after: Callable[[BenchRow], None] | None = None,
    moved: Callable[[], None] = lambda: None,
) -> list[BenchRow]:
    """Time the request's sizes one after the other. Collective: all ranks get the same rows.

    `after` is called with each row as soon as it is known; `moved` is called before each repeat.
    """
    rows = []
    for size in request.sizes_bytes:
        rows.append(_row(adapter, topology, request, size, moved))
        if after:
            after(rows[-1])
    return rows


def _row(adapter: Adapter, topology: Topology, request: BenchSpec, size: int, moved: Callable[[], None]) -> BenchRow:
    world = world_of(topology)
    count, name = size // DTYPES[request.dtype], f"bench.{request.collective}.{size}"
    mine, expected = _arrays(request, topology, count)

    def once() -> tuple[float, Tensor]:
        moved()
        tensor = adapter.from_numpy(mine.copy())  # the collective may overwrite it
        adapter.synchronize()
        # A barrier: otherwise the time would include waiting for the last rank.
        adapter.allreduce([adapter.from_numpy(np.zeros(1, np.float32))], world, op="sum", name="bench.barrier")
        adapter.synchronize()
        start = time.perf_counter()
        result = _collective(adapter, world, request, tensor, name)
        adapter.synchronize()
        return time.perf_counter() - start, result

    seconds, result = once()  # the first repeat negotiates the name and fills caches
    wrong = _faults(adapter.to_numpy(result), expected)
    warm_until = time.perf_counter() + _WARMUP_S
    for _ in range(_WARMUPS):
        if not all(adapter.allgather_object(time.perf_counter() < warm_until, world, name="bench.agree")):
            break
        seconds, result = once()
    slowest = max(adapter.allgather_object(seconds, world, name="bench.warm"))
    repeats = min(_MOST, max(_FEWEST, math.ceil(request.seconds / max(slowest, 1e-6))))
    times = np.zeros(repeats)
    for repeat in range(repeats):
        times[repeat], result = once()
    wrong += _faults(adapter.to_numpy(result), expected)
    everyone = adapter.allgather_object((times.tolist(), wrong), world, name="bench.gather")
    slowest_us = 1e6 * np.max([seconds for seconds, _ in everyone], axis=0)
    mean_us = float(slowest_us.mean())
    p50, p95, p99 = (float(value) for value in np.percentile(slowest_us, [50, 95, 99]))
    algbw = 8 * size / mean_us
    return BenchRow(
        size_bytes=size,
        count=count,
        dtype=request.dtype,
        redop=request.redop if request.collective in ("allreduce", "reducescatter") else "none",
        time_us=mean_us,
        p50_us=p50,
        p95_us=p95,
        p99_us=p99,
        algbw_mbit_per_s=algbw,
        busbw_mbit_per_s=algbw * bus_factor(request.collective, topology.size),
        repeats=repeats,
        wrong=sum(faults for _, faults in everyone),
    )


def copy_rate(adapter: Adapter, world: Group) -> float:
    """Bytes per second that a rank reads and writes in copies in main memory, while all ranks copy: the slowest's
    median. Collective."""
    source, target = np.ones(_COPIED_BYTES, np.uint8), np.zeros(_COPIED_BYTES, np.uint8)
    adapter.allgather_object(None, world, name="bench.copies")  # all ranks start
    seconds = []
    for _ in range(_COPIES):
        start = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - start)
    medians = adapter.allgather_object(float(np.median(seconds)), world, name="bench.copied")
    return float(2 * _COPIED_BYTES / max(medians))


def _collective(adapter: Adapter, world: Group, request: BenchSpec, tensor: Tensor, name: str) -> Tensor:
    if request.collective == "allreduce":
        return adapter.allreduce([tensor], world, op=request.redop, name=name, overwrite=True)[0]
    if request.collective == "reducescatter":
        return adapter.reducescatter(tensor, world, op=request.redop, name=name)
    if request.collective == "broadcast":
        return adapter.broadcast(tensor, world, 0, name=name)
    return (adapter.allgather if request.collective == "allgather" else adapter.alltoall)(tensor, world, name=name)


def _arrays(request: BenchSpec, topology: Topology, count: int) -> tuple[np.ndarray, np.ndarray]:
    """This rank's input and the expected result, both (n,) and exact in the request's dtype.

    Values are whole numbers from 0 to 10 that differ between ranks and along the tensor. For an average they are
    multiplied by the number of ranks. Whole numbers are added without rounding, in any order.
    """
    size, rank, average = topology.size, topology.rank, request.redop == "average"
    part = count // size
    periods = [(np.arange(_PERIOD) + 3 * of_rank) % _PERIOD * (size if average else 1) for of_rank in range(size)]

    def along(values: np.ndarray, start: int, length: int) -> np.ndarray:
        # Converted first: 64-bit numbers would take eight times the memory of a tensor of bytes.
        return np.resize(np.roll(values.astype(request.dtype), -(start % _PERIOD)), length)

    def reduced(start: int, length: int) -> np.ndarray:
        total = functools.reduce(_COMBINE[request.redop], periods)
        return along(total // size if average else total, start, length)

    def gathered(start: int) -> np.ndarray:
        return np.concatenate([along(values, start, part) for values in periods])

    if request.collective == "allgather":
        return along(periods[rank], 0, part), gathered(0)
    expected = {
        "allreduce": lambda: reduced(0, count),
        "reducescatter": lambda: reduced(rank * part, part),
        "broadcast": lambda: along(periods[0], 0, count),
        "alltoall": lambda: gathered(rank * part),
    }
    return along(periods[rank], 0, count), expected[request.collective]()


_COMBINE: dict[str, Any] = {"sum": np.add, "average": np.add, "min": np.minimum, "max": np.maximum}


def _faults(got: np.ndarray, expected: np.ndarray) -> int:
    """The number of wrong elements; all of them if the shape or dtype is wrong."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return max(1, expected.size)
    return int(np.count_nonzero(got != expected))


def main(argv: list[str]) -> None:
    """Run one rank as the command line says, and end the process."""
    framework, request, out = argv[0], BenchSpec.model_validate_json(argv[1]), Path(argv[2])
    end_as_rank(lambda heartbeat: _run(framework, request, out, heartbeat))


def _run(framework: str, request: BenchSpec, out: Path, heartbeat: Heartbeat) -> None:
    from hvdkit import adapters

    heartbeat.beat("loading the framework")
    adapter = adapters.load(framework)
    heartbeat.beat("starting Horovod")
    topology = adapter.init(request.device)
    startup.done()
    rows: list[BenchRow] = []

    def after(row: BenchRow) -> None:
        rows.append(row)
        heartbeat.beat(f"{row.size_bytes} bytes done", len(rows))
        if topology.is_root:
            write_atomic(out / ROWS, json.dumps([measured.model_dump() for measured in rows]))

    heartbeat.beat("measuring")
    # A large tensor over a slow link takes a minute or more, so each repeat counts as progress.
    measure(adapter, topology, request, after, lambda: heartbeat.beat("measuring", len(rows)))
    rate = copy_rate(adapter, world_of(topology)) if topology.device == "cpu" else None
    hosts = adapter.allgather_object(HOST, world_of(topology), name="bench.hosts")
    if topology.is_root:
        report = {
            "hosts": hosts,
            "device": topology.device,
            "versions": adapter.versions(),
            "settings": {
                key: value for key, value in os.environ.items() if key.startswith("HOROVOD_") and "SECRET" not in key
            },
            "memory_bytes_per_s": rate,
            "shared_memory_ranks": topology.shared_memory_ranks,
        }
        write_atomic(out / RANKS, json.dumps(report))
    heartbeat.beat("leaving Horovod")
    adapter.shutdown()


if __name__ == "__main__":
    startup.begin()
    main(sys.argv[1:])
