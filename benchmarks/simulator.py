"""`make bench-simulator`: what-ifs a second, and the time of one prediction, on one core; benchmarks/simulator.md."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from hvdkit.files import write_atomic
from hvdkit.results.machine import this_machine
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import engine, step
from hvdkit.simulator.costs import Network
from hvdkit.simulator.settings import Link, Settings, applied
from hvdkit.simulator.workload import Tensor, Workload
from hvdkit.tasks.resnet import architecture, parameter_shapes

HERE = Path(__file__).parent
CASES, ROUNDS = 1000, 7
POLICIES = ("horovod", "ddp", "mg-wfbp", "caffe-mpi", "grouped")
MARK_PER_SECOND, MARK_MS = 1000.0, 50.0


def main() -> None:
    """Measure, print, write."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    small, large = workload("resnet50"), workload("resnet152")
    cluster = clusters.load(Path("v100-nvlink-ib"))
    links = [applied(cluster, Settings(link={"infiniband": Link(mbit_per_s=1e4 * (1 + i))})) for i in range(20)]
    rates = {policy: CASES / median(lambda p=policy: batch(small, links, p)) for policy in POLICIES}
    single = {
        ranks: 1e3 * median(lambda n=ranks: engine.run(step.detailed(step.Case(large, Network(cluster, n), "horovod"))))
        for ranks in (8, 100, 1_000, 10_000)
    }
    machine = this_machine()
    found = {"what_ifs_per_second": rates, "resnet152_ms_by_ranks": single, "machine": machine.model_dump()}
    write_atomic(HERE / "simulator.json", json.dumps(found, indent=2) + "\n")
    lines = [
        "# What an answer costs",
        "",
        f"Written by `make bench-simulator` on one core of {machine.processor}, {machine.system}, medians of {ROUNDS}.",
        "",
        f"A batch of {CASES:,} what-ifs of ResNet-50 (161 gradients) at 64 ranks: batch size, fusion threshold, cycle",
        "time, bucket size, link rate and speed all differ.",
        "",
        "| policy | what-ifs/s |",
        "|---|---|",
        *(f"| {policy} | {rate:,.0f} |" for policy, rate in rates.items()),
        "",
        "One step of ResNet-152 (467 gradients) in full, with every layer and bucket, by Horovod's policy:",
        "",
        "| ranks | ms |",
        "|---|---|",
        *(f"| {ranks:,} | {ms:.1f} |" for ranks, ms in single.items()),
    ]
    write_atomic(HERE / "simulator.md", "\n".join(lines) + "\n")
    print("\n".join(lines))
    missed = [policy for policy, rate in rates.items() if rate < MARK_PER_SECOND]
    if missed or single[10_000] > MARK_MS:
        raise SystemExit(f"missed: {missed or '10,000 ranks'}")


def batch(work: Workload, links: list[clusters.Cluster], policy: str) -> None:
    """A thousand what-ifs at once, their networks made anew as for a user."""
    networks = [Network(link, 64) for link in links]
    cases = [
        step.Case(
            work,
            networks[i % len(networks)],
            policy,
            threshold_bytes=2.0 ** (16 + i % 12),
            cycle_s=1e-3 * (1 + i % 10),
            bucket_bytes=2.0 ** (18 + i % 10),
            batch=0.25 + i % 8,
            speed=1 + (i % 5) / 5,
        )
        for i in range(CASES)
    ]
    step.simulate(cases)


def workload(model: str) -> Workload:
    """Its gradients, with all layers alike in time: 0.3 s."""
    shapes = parameter_shapes(architecture(model, 1000))
    each = 0.1 / len(shapes)
    tensors = [
        Tensor(name, name.rpartition(".")[0], shape, 4 * math.prod(shape), 2 * each)
        for name, shape in reversed(shapes.items())
    ]
    return Workload(model, 64, tuple((name, each) for name in shapes), tuple(tensors))


def median(act: Callable[[], object]) -> float:
    """Seconds, the median over ROUNDS after one that is left out."""
    act()
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        act()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


if __name__ == "__main__":
    main()
