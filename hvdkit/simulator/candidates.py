"""The changes that `hvdkit advise` tries: to the recipe, to how it is run, and to the hardware."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hvdkit.simulator import case_memory, refusals, step
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.settings import LinkSetting, Settings, applied

Kind = Literal["software", "hardware"]
MOST_RANKS = 16_384  # advice goes no further
_THRESHOLDS = (1.0, 4.0, 16.0, 64.0, 256.0)  # MiB
_CYCLES = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0)  # ms
_COMPRESSIONS: tuple[dict[str, Any], ...] = (
    *({"method": name} for name in ("fp16", "bf16", "int8")),
    *({"method": "topk", "ratio": ratio} for ratio in (0.1, 0.01)),
    {"method": "powersgd", "rank": 2},
)


@dataclass(frozen=True)
class Candidate:
    """Other settings, another cluster, or another number of ranks.

    `changed` are the keys of `--set`; `recipe` those of the recipe, None if no key of the recipe does it. `evidence`
    names entries of evidence.yaml. `other_machines` says that the price is that of `cluster`; `usual`, that it is
    one of the remedies that come first: tuning, overlap, accumulation, a larger batch, half precision, sharding.
    """

    kind: Kind
    what: str
    settings: Settings
    changed: dict[str, Any]
    cluster: Cluster
    ranks: int
    recipe: dict[str, Any] | None = None
    effort: str = "a key of the recipe"
    evidence: tuple[str, ...] = ()
    other_machines: bool = False
    usual: bool = False


def software(fitted: Calibration, now: Candidate) -> Iterator[Candidate]:
    """Each change that costs no money, by itself. `now` is how the recipe is run today."""
    with_keys = partial(_with_keys, now)
    if tuned := _tuned(fitted, now):
        yield replace(tuned, usual=True)
    # On CPUs communication takes the cores that backward needs, and overlap is slower (benchmarks/notes.md).
    if not fitted.on_cpu or now.cluster.device.relative_speed:
        merged = with_keys("send gradients during backward, merged as it pays (mg-wfbp)", {"policy": "mg-wfbp"})
        yield replace(merged, usual=True, recipe=None, effort="no key of the recipe: the framework's hooks")
    for algorithm in ("ring", "hierarchical"):
        if len(now.cluster.levels) > 1:
            yield with_keys(f"allreduce: {algorithm}", {"allreduce": algorithm})
    batches = fitted.workload.recipe.accumulate if fitted.workload.recipe else 1
    for times in (2, 4, 8):
        count = times * now.settings.accumulate
        more = with_keys(f"accumulate {times} times as many batches for an update", {"accumulate": count}, "batch")
        yield replace(more, recipe={"accumulate": count * batches}, usual=True)
    yield from _halves(fitted, now)
    for compression in _COMPRESSIONS:
        method, *numbers = compression.values()
        name = " ".join([method, *(f"{number:g}" for number in numbers)])
        compressed = with_keys(f"compress gradients: {name}", {"compression": compression}, method)
        yield replace(compressed, usual=method in ("fp16", "bf16"))
    for every in (2, 4, 8, 16):
        what = f"Local SGD, ranks average every {every} steps"
        yield with_keys(what, {"sync": {"every": every}}, f"local-sgd-{every}")
    work = fitted.workload
    own = now.settings.batch_size or work.batch_size
    today = fitted.case(now.cluster, now.ranks, now.settings)
    room = case_memory.largest_batch(today)
    fullest = {room} if room and own < room < 4 * own else set()
    for size in sorted({2 * own, 4 * own, *fullest}):
        keys: dict[str, Any] = {"batch_size": size}
        units = size * work.units_per_sample
        what = f"{f'{units:,}' if work.units_per_sample > 1 else units} {work.unit} per rank and step"
        what += ", the most that fit" if size == room else ""
        stage = refusals.cheapest(fitted.case(now.cluster, now.ranks, now.settings.model_copy(update=keys)))
        if stage not in (None, "none", now.settings.sharding):
            what, keys = f"{what}, which fit with sharding: {stage}", keys | {"sharding": stage}
        elif stage is None and _fits_recomputed(fitted, now, keys):
            what, keys = f"{what}, which fit with recompute", keys | {"recompute": True}
        yield replace(with_keys(what, keys, "batch"), usual=True)
    for stage in work.stages[1:] if now.settings.sharding is None and now.ranks > 1 else ():
        yield replace(with_keys(f"sharding: {stage}", {"sharding": stage}), usual=True)


def smaller(fitted: Calibration, now: Candidate) -> Iterator[Candidate]:
    """Each change by which a rank needs less memory at the same batch."""
    for stage in fitted.workload.stages[1:] if now.ranks > 1 else ():
        yield _with_keys(now, f"sharding: {stage}", {"sharding": stage})
    if not now.settings.recompute:
        yield _with_keys(now, "recompute", {"recompute": True})
    yield from _halves(fitted, now)


def _halves(fitted: Calibration, now: Candidate) -> Iterator[Candidate]:
    """The 16-bit format in which the cluster's devices compute."""
    half = now.cluster.device.half_precision
    if half != "none" and now.settings.precision is None and fitted.workload.precision == "fp32":
        yield replace(_with_keys(now, f"train in {half}", {"precision": half}, "precision"), usual=True)


def _fits_recomputed(fitted: Calibration, now: Candidate, keys: dict[str, Any]) -> bool:
    settings = now.settings.model_copy(update=keys | {"recompute": True})
    case = fitted.case(now.cluster, now.ranks, settings)
    return refusals.refusal(case, settings) is None


def _with_keys(now: Candidate, what: str, keys: dict[str, Any], *evidence: str) -> Candidate:
    settings = Settings.model_validate(now.settings.model_dump() | keys)
    return replace(now, what=what, settings=settings, changed=keys, recipe=keys, evidence=evidence)


def _tuned(fitted: Calibration, now: Candidate) -> Candidate | None:
    """The best fusion threshold and cycle time of a grid; None if nothing is fused."""
    base = fitted.case(now.cluster, now.ranks, now.settings)
    if not base.rules.fuses or base.policy == "ddp" or now.ranks == 1:
        return None
    grid = list(itertools.product(_THRESHOLDS, _CYCLES if base.policy == "horovod" else (1e3 * base.cycle_s,)))
    cases = [replace(base, threshold_bytes=mib * 2**20, cycle_s=1e-3 * ms) for mib, ms in grid]
    mib, ms = grid[int(step.periods(cases).argmin())]
    keys = {"fusion_threshold_mib": mib, "cycle_time_ms": ms}
    what = f"fusion threshold {mib:g} MiB, cycle time {ms:g} ms"
    settings = now.settings.model_copy(update=keys)
    return replace(now, what=what, settings=settings, changed=keys, recipe={"tune": "measure"})


def hardware(now: Candidate) -> Iterator[Candidate]:
    """Faster links, more ranks, and the faster machines among the cluster files that hvdkit ships."""
    level = now.cluster.levels[-1]
    rate = level.pieces[-1].mbit_per_s
    for times in () if level.kind == "memory" else (2.5, 10.0):
        links = {level.name: LinkSetting(mbit_per_s=rate * times)}
        yield replace(
            now,
            kind="hardware",
            what=f"{level.name} at {rate * times:,.0f} Mbit/s instead of {rate:,.0f}",
            cluster=applied(now.cluster, Settings(link=links)),
            settings=now.settings.model_copy(update={"link": now.settings.link | links}),
            changed={"link": {level.name: {"mbit_per_s": rate * times}}},
            effort="other network cards and switches; their price is not in the cost",
        )
    for ranks in (now.ranks * 2, now.ranks * 4):
        if ranks <= (now.cluster.largest or MOST_RANKS):
            what = f"{ranks} ranks instead of {now.ranks}"
            yield replace(now, kind="hardware", what=what, ranks=ranks, effort="more machines", evidence=("ranks",))
    for other, faster in other_machines(now):
        if faster.speed > now.settings.speed and now.ranks <= (other.largest or MOST_RANKS):
            yield replace(
                now, kind="hardware", what=f"{other.device.name}s on {other.name}", settings=faster, cluster=other,
                changed={"speed": faster.speed}, effort="other machines", other_machines=True,
            )  # fmt: skip


def other_machines(now: Candidate) -> Iterator[tuple[Cluster, Settings]]:
    """The clusters that hvdkit ships whose device has a known speed, if this one's has, with today's settings there."""
    mine = now.cluster.device.relative_speed
    for name in clusters.shipped() if mine else ():
        other = clusters.load(Path(name))
        if mine and (speed := other.device.relative_speed):
            scaled = {"speed": now.settings.speed * speed / mine, "link": {}}
            yield other, now.settings.model_copy(update=scaled)
