"""An allreduce of two ranks of one host: Horovod in shared memory and over sockets, torch's Gloo, and Open MPI.

    .venv/bin/python -m benchmarks.shared_memory [--framework pytorch] [--rounds 9]

A round takes each side once, directly after each other, in random order. Horovod's sides are `hvdkit bench allreduce`,
which checks each element; torch's Gloo and Open MPI are programs of `plain/`, which need Debian's libopenmpi-dev and
openmpi-bin, and are taken beside PyTorch. Times are of the slower rank, medians over the repeats of a run. Writes
shared_memory.json and shared_memory.md beside itself.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from benchmarks.harness import FRAMEWORKS, interval
from hvdkit.errors import RequestError
from hvdkit.runtimes.store import find

SMALLEST, LARGEST, FACTOR = 6_400, 104_857_600, 4
SIZES = [SMALLEST * FACTOR**i for i in range(8)]
HOROVOD = ("memory", "sockets")
OTHERS = ("gloo", "mpi")
RANKS, TIMEOUT_S, SECONDS = 2, 300.0, 0.6
Times = dict[str, float]  # microseconds by size in bytes


def main() -> None:
    """The command line."""
    args = harness.parser(__doc__, rounds=9, keep="shared-memory", frameworks=True).parse_args()
    keep, frameworks = harness.kept(args), args.framework or FRAMEWORKS
    program = compiled(keep) if "pytorch" in frameworks else None

    def run(framework: str, _: int, side: str, out: Path) -> Times:
        if side in HOROVOD:
            return of_horovod(framework, side, out)
        return of_gloo(out) if side == "gloo" else of_mpi(str(program))

    found = {}
    for framework in frameworks:
        sides = HOROVOD + (OTHERS if framework == "pytorch" else ())
        rounds = harness.rounds(keep, [framework], sides, args.rounds, run)[framework]
        found[framework] = summary(framework, sides, rounds)
    written.publish("shared_memory", {"ranks": RANKS, "sizes_bytes": SIZES, "frameworks": found}, args.out)


def summary(framework: str, sides: Sequence[str], rounds: list[dict[str, Times]]) -> dict[str, Any]:
    """Microseconds of each side by size, and how many times as long the others take as shared memory."""
    sizes = [str(size) for size in SIZES]
    return {
        "time_us": {
            side: {size: interval([one[side][size] for one in rounds], "each") for size in sizes} for side in sides
        },
        "over_memory": {
            side: {size: interval([one[side][size] / one["memory"][size] for one in rounds]) for size in sizes}
            for side in sides[1:]
        },
        "versions": find(framework).versions,
        "rounds": len(rounds),
    }


def of_horovod(framework: str, side: str, out: Path) -> Times:
    """`hvdkit bench`, with or without shared memory."""
    sizes = ["--min-bytes", str(SMALLEST), "--max-bytes", str(LARGEST), "--factor", str(FACTOR)]
    how = {"env": {**os.environ, "HOROVOD_SHARED_MEMORY": str(int(side == "memory"))}}
    command = ["bench", "allreduce", "--framework", framework, "-np", str(RANKS), *sizes, "--seconds", str(SECONDS)]
    harness.hvdkit([*command, "--out", out], TIMEOUT_S, **how)
    return {str(row["size_bytes"]): row["p50_us"] for row in json.loads((out / "bench.json").read_text())["rows"]}


def of_gloo(out: Path) -> Times:
    """Two processes of torch.distributed."""
    out.mkdir(parents=True)

    def process(rank: int) -> str:
        script = harness.HERE / "plain" / "allreduce_gloo.py"
        command = [find("pytorch").python, script, str(rank), str(RANKS), out / "store", *map(str, SIZES)]
        return harness.run(command, TIMEOUT_S, env={**os.environ, **harness.ONE_THREAD}, stderr=subprocess.PIPE)

    with ThreadPoolExecutor(RANKS) as pool:
        return dict(json.loads(next(filter(None, pool.map(process, range(RANKS)))).splitlines()[-1]))


def of_mpi(program: str) -> Times:
    """Two processes of Open MPI."""
    start = ["mpirun", "--allow-run-as-root", "-np", str(RANKS), program, *map(str, SIZES)]
    return dict(json.loads(harness.run(start, TIMEOUT_S, stderr=subprocess.PIPE).splitlines()[-1]))


def compiled(keep: Path) -> Path:
    """The program for MPI. Raises RequestError where there is no MPI to compile it with."""
    if not shutil.which("mpicc") or not shutil.which("mpirun"):
        raise RequestError("mpicc and mpirun: not found; apt-get install libopenmpi-dev openmpi-bin")
    keep.mkdir(parents=True, exist_ok=True)
    harness.run(["mpicc", "-O3", harness.HERE / "plain" / "allreduce_mpi.c", "-o", keep / "allreduce_mpi"])
    return keep / "allreduce_mpi"


if __name__ == "__main__":
    harness.exit_with(main)
