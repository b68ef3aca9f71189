"""What could be changed, in the recipe and how it is run, or in what it runs on; `advise.py` tells what it brings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hvdkit.simulator import cluster as clusters
from hvdkit.simulator import step
from hvdkit.simulator.basis import Basis
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.costs import Network
from hvdkit.simulator.settings import Compression, Link, Settings, Sync, applied, case

Kind = Literal["software", "hardware"]
MOST_RANKS = 16_384  # beyond which nobody is told to look
_THRESHOLDS = (1.0, 4.0, 16.0, 64.0, 256.0)  # MiB
_CYCLES = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0)  # ms


@dataclass(frozen=True)
class Change:
    """A candidate: other settings, another cluster or another number of ranks, and how the recipe would say it."""

    kind: Kind
    what: str
    settings: Settings
    told: dict[str, Any]
    cluster: Cluster
    ranks: int
    recipe: dict[str, Any] | None = None
    effort: str = "a key of the recipe"
    evidence: tuple[str, ...] = ()
    elsewhere: bool = False  # other machines, at their own price


def software(found: Basis, now: Change) -> Iterator[Change]:
    """Everything that costs no money, each by itself. `now` is how it is run today."""
    tuned = _tuned(found, now)
    if tuned is not None:
        yield tuned
    # On CPUs communication takes the cores that backward needs: there it was slower (benchmarks/overlap.md).
    if not found.on_cpu or now.cluster.device.relative_speed:
        merged = now.settings.model_copy(update={"policy": "mg-wfbp"})
        yield replace(
            now,
            what="send gradients during backward, merged as it pays (mg-wfbp)",
            settings=merged,
            told={"policy": "mg-wfbp"},
            effort="no recipe says it: the framework's hooks",
        )
    for algorithm in ("ring", "hierarchical"):
        if len(now.cluster.levels) > 1:
            other = now.settings.model_copy(update={"allreduce": algorithm})
            told: dict[str, Any] = {"allreduce": algorithm}
            yield replace(now, what=f"allreduce: {algorithm}", settings=other, told=told, recipe=told)
    for compression in _compressions():
        other = now.settings.model_copy(update={"compression": compression})
        keys = {"topk": ("method", "ratio"), "powersgd": ("method", "rank")}.get(compression.method, ("method",))
        told = {"compression": {key: getattr(compression, key) for key in keys}}
        name = compression.method + "".join(f" {getattr(compression, key):g}" for key in keys[1:])
        yield replace(
            now,
            what=f"compress gradients: {name}",
            settings=other,
            told=told,
            recipe=told,
            evidence=(compression.method,),
        )
    for every in (2, 4, 8, 16):
        other = now.settings.model_copy(update={"sync": Sync(every=every)})
        told = {"sync": {"every": every}}
        yield replace(
            now, what=f"Local SGD, ranks meet every {every} steps", settings=other, told=told, recipe=told,
            evidence=(f"local-sgd-{every}",),
        )  # fmt: skip
    for times in (2, 4):
        size = times * (now.settings.batch_size or found.workload.batch_size)
        other = now.settings.model_copy(update={"batch_size": size})
        yield replace(
            now, what=f"{size} images a rank and step", settings=other, told={"batch_size": size},
            recipe={"batch_size": size}, evidence=("batch",),
        )  # fmt: skip


def _compressions() -> list[Compression]:
    names = ["fp16", "bf16", "int8"]
    ratios = [Compression(method="topk", ratio=ratio) for ratio in (0.1, 0.01)]
    return [*(Compression(method=name) for name in names), *ratios, Compression(method="powersgd", rank=2)]


def _tuned(found: Basis, now: Change) -> Change | None:
    """The best fusion threshold and cycle time, out of all at once; None where nothing is fused."""
    base = case(found.workload, Network(now.cluster, now.ranks), now.settings, found.known)
    if not base.rules.fuses or base.policy == "ddp" or now.ranks == 1:
        return None
    grid = list(itertools.product(_THRESHOLDS, _CYCLES if base.policy == "horovod" else (1e3 * base.cycle_s,)))
    cases = [replace(base, threshold_bytes=mib * 2**20, cycle_s=1e-3 * ms) for mib, ms in grid]
    periods = step.simulate(cases).period
    mib, ms = grid[int(periods.argmin())]
    told = {"fusion_threshold_mib": mib, "cycle_time_ms": ms}
    what = f"fusion threshold {mib:g} MiB, cycle time {ms:g} ms"
    return replace(now, what=what, settings=now.settings.model_copy(update=told), told=told, recipe={"tune": "measure"})


def hardware(now: Change) -> Iterator[Change]:
    """Faster links, more ranks, and the faster machines that hvdkit has a cluster file of."""
    level = now.cluster.levels[-1]
    rate = level.pieces[-1].mbit_per_s
    for times in (2.5, 10.0):
        links = {level.name: Link(mbit_per_s=rate * times)}
        faster = now.settings.model_copy(update={"link": now.settings.link | links})
        yield replace(
            now,
            kind="hardware",
            what=f"{level.name} at {rate * times:,.0f} Mbit/s instead of {rate:,.0f}",
            cluster=applied(now.cluster, Settings(link=links)),
            settings=faster,
            told={"link": {level.name: {"mbit_per_s": rate * times}}},
            effort="other network cards and switches; their price is not in the cost",
        )
    for ranks in (now.ranks * 2, now.ranks * 4):
        if ranks <= (now.cluster.largest or MOST_RANKS):
            what = f"{ranks} ranks instead of {now.ranks}"
            yield replace(now, kind="hardware", what=what, ranks=ranks, effort="more machines", evidence=("ranks",))
    mine = now.cluster.device.relative_speed
    for name in clusters.shipped() if mine else ():
        other = clusters.load(Path(name))
        speed = other.device.relative_speed
        if not mine or not speed or speed <= mine or now.ranks > (other.largest or MOST_RANKS):
            continue
        quick = now.settings.model_copy(update={"speed": now.settings.speed * speed / mine, "link": {}})
        yield replace(
            now, kind="hardware", what=f"{other.device.name}s on {name}", settings=quick, cluster=other,
            told={"speed": quick.speed}, effort="other machines", elsewhere=True,
        )  # fmt: skip
