"""The rows of own-hosts.json.gz: steps over slow links, predicted from profiles without them and `hvdkit bench`.

A row is a step's time over that of `compute`, the same ranks when they send nothing: 1 is a network that costs
nothing. Four ranks share two cores, so compute is set to what `compute` took, and ranks wait less for the last of them
(`shared_wait`). All else is what `hvdkit predict` does by default: what the method costs to compute, and how unequal
ranks are from step to step, by its profile at 2 ranks without a slow link; collectives by the lines that `hvdkit bench`
has fitted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import numpy as np

from benchmarks import anchored
from benchmarks.anchored import Row
from hvdkit.results.profile import Profile
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator.calibration import Calibration, calibrate
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.piecewise_linear import of_pieces
from hvdkit.simulator.predict import Point, point
from hvdkit.simulator.settings import Settings

HERE = Path(__file__).resolve().parent
COMPUTE, DENSE, RANKS, CORES = "compute", "dense", 4, 2
RATIOS, FITTED = "own hosts", "own hosts, bench"
ABSOLUTE, WHAT_IF = "own hosts, cores shared", "own hosts, dense profile alone"


def rows() -> Iterator[Row]:
    """All of them; nothing where it was not measured."""
    if not (HERE / "own-hosts.json.gz").exists():
        return
    table = measured()
    for links in table["links"]:
        yield from _fitted(links)
    for turns in table["turns"]:
        framework, rate = turns["framework"], turns["mbit_per_s"]
        cluster, label = network(table, framework, rate), f"{framework}, {rate:g} Mbit/s"
        alone = median(turns["step_ms"][COMPUTE])
        yield Row(RATIOS, f"{label}, {COMPUTE}", "× compute", 1.0, 1.0, "calibration")
        for method, ratios in _ratios(turns).items():
            row, ratio = f"{label}, {method}", median(ratios)
            own, dense = profile(framework, method), profile(framework, DENSE)
            scaled = _as_slow(calibrate(own), alone)
            naive = point(scaled, cluster, RANKS, Settings(policy="naive"))
            baselines = {"linear": 1.0, "plain_sum": naive.step_ms / alone}
            yield _row(RATIOS, row, point(scaled, cluster, RANKS, Settings()), ratio, alone, **baselines)
            yield _row(WHAT_IF, row, _what_if(dense, own, alone, cluster), ratio, alone)
            # Without `compute`: a rank of the profile had a core, one of the hosts has half of one.
            shared = point(_slower(calibrate(own), RANKS / CORES), cluster, RANKS, Settings())
            yield _row(ABSOLUTE, row, shared, median(turns["step_ms"][method]))


def _ratios(turns: Any) -> dict[str, list[float]]:
    """Each method's step ÷ that of `compute`, by round."""
    steps = turns["step_ms"]
    return {
        method: [step / alone for step, alone in zip(steps[method], steps[COMPUTE], strict=True)]
        for method in steps
        if method != COMPUTE
    }


def _row(name: str, row: str, found: Point, measured: float, alone: float | None = None, **baselines: float) -> Row:
    """A predicted step, in ms or as a ratio to what `compute` takes, `alone` ms."""
    low, step, high = (value / (alone or 1.0) for value in (found.low_ms, found.step_ms, found.high_ms))
    return Row(name, row, "× compute" if alone else "ms", step, measured, "validation", low, high, **baselines)


def disordered(found: Iterable[Row]) -> tuple[list[str], int]:
    """The pairs of methods that differ in all rounds and are predicted in the wrong order; and how many pairs differ.

    Nothing where nothing was measured.
    """
    wrong, pairs = [], 0
    predicted = {row.row: row.predicted for row in found if row.set == RATIOS}
    for turns in measured()["turns"] if predicted else ():
        label, ratios = f"{turns['framework']}, {turns['mbit_per_s']:g} Mbit/s", _ratios(turns)
        for one, other in itertools.permutations(ratios, 2):
            if max(ratios[one]) < min(ratios[other]):
                pairs += 1
                if predicted[f"{label}, {one}"] >= predicted[f"{label}, {other}"]:
                    wrong.append(f"{label}, {one} was faster than {other}")
    return wrong, pairs


@cache
def measured() -> Any:
    """own-hosts.json.gz."""
    return anchored.measured(HERE / "own-hosts.json.gz")


@cache
def profile(framework: str, method: str) -> Profile:
    """Of a method at 2 ranks, as own-hosts-profiles.json.gz has it."""
    found = anchored.measured(HERE / "own-hosts-profiles.json.gz")[framework]
    return Profile.model_validate_json(json.dumps(found["dense"] | found["changes"].get(method, {})))


def network(table: Any, framework: str, rate: float) -> Cluster:
    """The cluster file that `hvdkit bench` has written."""
    (found,) = [links for links in table["links"] if (links["framework"], links["mbit_per_s"]) == (framework, rate)]
    return clusters.read(found["cluster"], f"{framework} at {rate:g} Mbit/s")


def _fitted(links: Any) -> Iterator[Row]:
    cluster = clusters.read(links["cluster"], "own-hosts.json")
    for one in cluster.measured:
        for size, micros in links["points"][one.operation]:
            row = f"{links['framework']}, {links['mbit_per_s']:g} Mbit/s, {one.operation}, {size} bytes"
            found = 1e6 * float(of_pieces(one.pieces)(size))
            yield Row(FITTED, row, "us", found, micros, "calibration")


def shared_wait(ranks: int, cores: int) -> float:
    """How long ranks that share cores wait for the last of them, relative to ranks with a core each.

    A rank that is done leaves its part of the cores to the others. So among ranks with the work w(1) <= … <= w(n) the
    last ends not at w(n), but after the sum of (w(k) - w(k-1)) × max(1, (n-k+1) / cores). The work is normal; its order
    statistics are Blom's (1958).
    """
    expected = [NormalDist().inv_cdf((k - 0.375) / (ranks + 0.25)) for k in range(1, ranks + 1)]
    sharing = [max(1.0, (ranks - k) / cores) for k in range(ranks)]
    ends = sum(each * share for each, share in zip(np.diff(expected, prepend=0.0), sharing, strict=True))
    return max(0.0, float(ends) / sharing[0] / expected[-1])


def _slower(found: Calibration, factor: float) -> Calibration:
    """All that the rank does by itself takes `factor` times as long, on cores that it shares."""
    work, names = found.workload, ("tail_s", "update_s", "earlier_s", "serial_s", "compression_s")
    slower = replace(
        work,
        forward=tuple((name, factor * seconds) for name, seconds in work.forward),
        tensors=tuple(replace(tensor, segment_s=factor * tensor.segment_s) for tensor in work.tensors),
        jitter=work.jitter * shared_wait(RANKS, CORES),
        **{name: factor * getattr(work, name) for name in names},
    )
    return replace(found, workload=slower)


def _as_slow(found: Calibration, alone_ms: float) -> Calibration:
    """A rank's own work, so slow that it takes what `compute` took; what its method adds is as much slower."""
    return _slower(found, 1e-3 * alone_ms / (anchored.compute_s(found.workload) + found.workload.serial_s))


def _what_if(dense: Profile, own: Profile, alone_ms: float, cluster: Cluster) -> Point:
    """The same from the dense profile alone: what the method costs to compute is counted then, not measured."""
    known = calibrate(own).known
    asked = Settings(compression=known.compression, sync=known.sync, allreduce=known.allreduce)
    return point(_as_slow(calibrate(dense), alone_ms), cluster, RANKS, asked)
