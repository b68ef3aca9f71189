"""How fast the simulator answers on one core: what-ifs a second, and the time of a prediction.

    make bench-simulator        (or: .venv/bin/python -m benchmarks.simulator)

Writes simulator.json and simulator.md beside itself; exit status 1 if a limit is missed.
"""

from __future__ import annotations

import os
import statistics
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness, written
from hvdkit.profiling import published
from hvdkit.recipe import grid as grids
from hvdkit.results.profile import Profile
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import engine, step
from hvdkit.simulator import sweep as sweeping
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.simulator.settings import LinkSetting, Settings, applied
from hvdkit.simulator.workload import Workload
from tests.simulating import workload

CASES, ROUNDS = 1000, 7
POLICIES = ("horovod", "ddp", "mg-wfbp", "caffe-mpi", "grouped")
MARK_PER_SECOND, MARK_MS = 1000.0, 50.0


def main() -> int:
    """Measure, write, print; returns the exit status."""
    args = harness.parser(__doc__).parse_args()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    small, large = workload("resnet50"), workload("resnet152")
    cluster = clusters.load(Path("v100-nvlink-ib"))
    links = [applied(cluster, Settings(link={"infiniband": LinkSetting(mbit_per_s=1e4 * (1 + i))})) for i in range(20)]
    rates = {policy: CASES / median(lambda p=policy: batch(small, links, p)) for policy in POLICIES}
    single = {
        ranks: 1e3
        * median(lambda n=ranks: engine.run(step.detailed(step.Case(large, ClusterLinks(cluster, n), "horovod"))))
        for ranks in (8, 100, 1_000, 10_000)
    }
    found = published.profile("resnet50", 2470, 256, "a100")
    sweep = CASES / median(lambda: grid(found, clusters.load(Path("aws-p3-16xlarge"))))
    outcome = {"cases": CASES, "rounds": ROUNDS, "what_ifs_per_second": rates, "resnet152_ms_by_ranks": single}
    outcome["sweep_per_second"] = sweep
    written.publish("simulator", outcome, args.out)
    missed = [policy for policy, rate in rates.items() if rate < MARK_PER_SECOND]
    missed += ["sweep"] if sweep < MARK_PER_SECOND else []
    missed += ["10,000 ranks"] if single[10_000] > MARK_MS else []
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    return 1 if missed else 0


def batch(work: Workload, links: list[clusters.Cluster], policy: str) -> None:
    """A thousand what-ifs at once, their networks made anew as for a user."""
    networks = [ClusterLinks(link, 64) for link in links]
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
    step.periods(cases)


def grid(profile: Profile, cluster: clusters.Cluster) -> None:
    """A thousand what-ifs as `hvdkit predict --sweep` takes them, each with its interval, from the texts on."""
    texts = ["n=8,16,...,64", "batch_size=32,64,...,512", "speed=0.1,0.2,...,1.0", "fusion_threshold_mib=4,8,...,64"]
    whatifs = sweeping.checked(grids.read(texts, "--sweep"), [], [], None, cluster)
    assert len(sweeping.sweep(profile, cluster, whatifs).rows) == CASES


def median(act: Callable[[], Any]) -> float:
    """Seconds, the median over ROUNDS after one that is left out."""
    return statistics.median(timeit.repeat(act, "gc.enable()", number=1, repeat=ROUNDS + 1)[1:])


if __name__ == "__main__":
    harness.exit_with(main)
