"""`hvdkit predict`: from a profile and a cluster file to step times at any number of ranks, with what bounds them.

An interval goes with each figure. It comes from how well the measured collectives are fitted, from how far the model
misses the profile's own step, and grows with every step away from what was measured; each such step is told.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from hvdkit.errors import RequestError
from hvdkit.results.profile import Profile
from hvdkit.simulator import engine, step
from hvdkit.simulator.basis import Basis, basis
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.costs import Network
from hvdkit.simulator.engine import Schedule, Span
from hvdkit.simulator.lines import Floats
from hvdkit.simulator.settings import Settings, case
from hvdkit.simulator.step import Case
from hvdkit.simulator.workload import Workload

SAMPLES = 64  # of the slowest rank's compute, one from each of as many equal parts of its distribution
MOST_RANKS = 10**9
_DRAWN = 10  # iterations of which one is drawn, in the middle of those whose input is read ahead
_LONG = 0.2  # of a step that ranks wait for the slowest, beyond which it is told
_ALONE = 5.0  # percent, where the profile had one rank and the prediction has more


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Critical(_Record):
    """A task of the critical path; `start_ms` counts from the end of the step before and may lie before it."""

    task: str
    kind: str
    resource: str | None
    start_ms: float
    ms: float


class Point(_Record):
    """One number of ranks. `low_ms` to `high_ms` is where the step time is believed to lie; `p99_ms` is its tail.

    `efficiency` is against as many ranks that communicate with nobody. `exposed_communication_ms` is what a network
    without any delay would save; `waiting_ms` what ranks wait for the slowest. `utilisation` is busy time over step
    time. `bytes_per_step` is what a rank puts into collectives. `memory_mib` is of a rank, None where nothing is known.
    """

    ranks: int
    batch_size: int
    policy: str
    algorithm: str
    step_ms: float
    low_ms: float
    high_ms: float
    p99_ms: float
    images_per_second: float
    efficiency: float
    exposed_communication_ms: float
    waiting_ms: float
    bytes_per_step: int
    utilisation: dict[str, float]
    bound: str
    memory_mib: float | None
    critical_path: list[Critical]
    warnings: list[str]


class Prediction(_Record):
    """`predict.json`."""

    schema_version: Literal[1] = 1
    model: str
    profile: str
    cluster: str
    settings: dict[str, object]
    measured_step_ms: float
    check_percent: float | None
    points: list[Point]


def predict(profile: Profile, cluster: Cluster, ranks: Sequence[int], settings: Settings) -> Prediction:
    """All of it, on a cluster whose links are as they are wanted (`settings.applied`).

    Raises RequestError where a number of ranks does not fit the cluster.
    """
    found = basis(profile)
    points = [point(found, cluster, number, settings) for number in checked(ranks, cluster)]
    return Prediction(
        model=profile.model,
        profile=f"{profile.framework} {profile.framework_version}, {profile.np} ranks, batch {profile.batch_size}",
        cluster=cluster.name,
        settings=settings.model_dump(exclude_defaults=True),
        measured_step_ms=profile.step.step_ms.mean,
        check_percent=found.check_percent,
        points=points,
    )


def checked(ranks: Sequence[int], cluster: Cluster | None) -> list[int]:
    """Numbers of ranks, each once. Raises RequestError for one that the cluster, where it is known, has no room for."""
    most = min(MOST_RANKS, (cluster.largest if cluster else None) or MOST_RANKS)
    for number in ranks:
        if not 1 <= number <= most:
            where = f" on cluster {cluster.name}" if cluster else ""
            raise RequestError(f"-n {number}: expected at least 1 and at most {most} ranks{where}")
    return list(dict.fromkeys(ranks))


def point(found: Basis, cluster: Cluster, ranks: int, settings: Settings) -> Point:
    """The prediction for one number of ranks on a cluster whose links are as they are wanted."""
    base = case(found.workload, Network(cluster, ranks), settings, found.known)
    jitter = _jitter(found, cluster, settings)
    factors = slowest(ranks, base.every, jitter, settings.seed)
    mean = float(factors.mean())
    middle = replace(base, slow=mean)
    # that more ranks than were profiled wait longer, each of them slow by its own chance, was not measured
    near = float(slowest(min(ranks, found.ranks), base.every, jitter, settings.seed).mean())
    doubt, wire_doubt, warnings = _doubt(found, base, settings)
    edges = [
        replace(middle, slow=near / (1 + doubt), wire=1 / (1 + wire_doubt)),
        replace(middle, slow=mean * (1 + doubt), wire=1 + wire_doubt),
    ]
    sampled = [replace(base, slow=float(factor)) for factor in factors] if mean > 1 else []
    steady = engine.run(step.detailed(middle))
    periods = step.simulate([*edges, *sampled]).period
    spread = periods[2:] if sampled else np.array([steady.period])
    seconds = float(spread.mean())
    # that gradients do go during backward is believed only where the profile has shown it
    shown = not base.rules.overlaps or (base.policy == found.known.policy and found.overlap_shown)
    in_turn = 0.0 if shown else float(engine.run(step.detailed(replace(middle, policy="grouped"))).period)
    quiet = float(engine.run(step.detailed(base.alone)).period)
    slow_quiet = float(engine.run(step.detailed(middle.alone)).period)
    waiting = max(0.0, slow_quiet - quiet)
    if waiting > _LONG * seconds:
        warnings.append(
            f"{100 * waiting / seconds:.0f} % of the step is waiting for the slowest rank, as compute is taken to vary "
            f"by {100 * jitter:.0f} % from step to step; profile on a quiet machine, or see what --set jitter=0.02 says"
        )
    batch = base.batch * found.workload.batch_size
    return Point(
        ranks=ranks,
        batch_size=round(batch),
        policy=base.policy if base.every == 1 else "local-sgd",
        algorithm=", ".join(dict.fromkeys(cost.algorithm for cost in base.costs)),
        step_ms=1e3 * seconds,
        low_ms=1e3 * min(seconds, float(periods[0])),
        high_ms=1e3 * max(seconds, float(periods[1]), in_turn),
        p99_ms=1e3 * float(np.quantile(spread, 0.99)),
        images_per_second=ranks * batch / seconds,
        efficiency=min(1.0, quiet / seconds),
        exposed_communication_ms=1e3 * max(0.0, seconds - slow_quiet),
        waiting_ms=1e3 * waiting,
        bytes_per_step=_sent(base),
        utilisation={name: float(busy) / float(steady.period) for name, busy in steady.busy().items()},
        bound=bound(steady, waiting),
        memory_mib=_memory(found.workload, base),
        critical_path=critical(steady),
        warnings=[*warnings, *_room(found.workload, base)],
    )


def schedule(found: Basis, cluster: Cluster, ranks: int, settings: Settings) -> Schedule:
    """Steps of the rank that all wait for, with every layer and bucket: what `point` tells the figures of."""
    base = case(found.workload, Network(cluster, ranks), settings, found.known)
    factors = slowest(ranks, base.every, _jitter(found, cluster, settings), settings.seed)
    return engine.run(step.detailed(replace(base, slow=float(factors.mean()))), _DRAWN)


def slowest(ranks: int, every: int, jitter: float, seed: int) -> Floats:
    """What the slowest of `ranks` computes is of the mean rank's, SAMPLES times, by chance from the seed.

    Each rank's is log-normal with the coefficient of variation `jitter`, independent of the others; the largest of n
    has the quantile u where one has u^(1/n), so that a million ranks cost what two do. With Local SGD the sum of
    `every` steps is what ranks wait for.
    """
    if jitter == 0 or ranks == 1:
        return np.ones(1)
    random = np.random.default_rng(seed)
    parts = (np.arange(SAMPLES) + random.random(SAMPLES)) / SAMPLES
    sigma = math.sqrt(math.log1p(jitter**2 / every))
    normal = NormalDist()
    # u^(1/n) rounds to 1 for many ranks; its distance from 1 does not
    above = -np.expm1(np.log(parts) / ranks)
    return np.array([math.exp(-sigma * normal.inv_cdf(value) - sigma**2 / 2) for value in above])


def bound(schedule: Schedule, waiting: float = 0.0) -> str:
    """What most of the critical path is: compute, communication, negotiation, input, gaps or waiting.

    Of the compute so many seconds are `waiting`: what the slowest rank takes longer than the others.
    """
    kinds = {"forward": "compute", "backward": "compute", "update": "compute", "compression": "compute"}
    kinds |= {"gap": "gaps", "fusion": "communication", "read": "input", "decode": "input", "copy": "input"}
    seconds: dict[str, float] = {}
    for span in schedule.critical_path():
        kind = kinds.get(span.task.kind, span.task.kind)
        seconds[kind] = seconds.get(kind, 0.0) + span.end - span.start
    seconds["compute"] = seconds.get("compute", 0.0) - waiting
    seconds["waiting"] = waiting
    return max(seconds, key=lambda kind: seconds[kind], default="compute")


def critical(schedule: Schedule) -> list[Critical]:
    """The critical path, by name."""
    last = schedule.graph.tasks[-1].name
    ends = [row[-1] for row in schedule.ends]
    begin = float(ends[-2]) if len(ends) > 1 else 0.0
    assert schedule.graph.last == last
    return [_critical(span, begin) for span in schedule.critical_path()]


def _critical(span: Span, begin: float) -> Critical:
    return Critical(
        task=span.task.name,
        kind=span.task.kind,
        resource=span.task.resource,
        start_ms=1e3 * (span.start - begin),
        ms=1e3 * (span.end - span.start),
    )


def _jitter(found: Basis, cluster: Cluster, settings: Settings) -> float:
    if settings.jitter is not None:
        return settings.jitter
    return max(found.workload.jitter, cluster.jitter)


def doubts(found: Basis, base: Case, settings: Settings) -> tuple[float, float]:
    """How far compute and communication are believed off, as fractions."""
    return _doubt(found, base, settings)[:2]


def _doubt(found: Basis, base: Case, settings: Settings) -> tuple[float, float, list[str]]:
    """How far compute and communication are believed off, as fractions, and what is told of it."""
    warnings: list[str] = []
    compute = found.believed_percent
    device = base.network.cluster.device
    if found.on_cpu and device.relative_speed and base.speed == 1:
        warnings.append(
            f"the profile is of CPUs: foreseen behind {base.network.cluster.name}'s links, not {device.name}s; "
            "say how many times as fast those are (--set speed=30), or profile on one of them"
        )
    if base.batch != 1:
        compute += 5 * abs(math.log2(base.batch))
        warnings.append(
            f"batch size {settings.batch_size} was not measured ({found.workload.batch_size} was): its time is scaled"
        )
    if base.speed != 1:
        compute += 5 * abs(math.log2(base.speed))
        warnings.append(f"a device {base.speed:g} times as fast was not measured: its time is scaled")
    if base.network.ranks == 1:
        return compute / 100, 0.0, warnings
    if found.ranks == 1:
        compute += _ALONE
        warnings.append("the profile is of one rank: what ranks cost each other beside communication is not in it")
    if base.rules.overlaps and not found.overlap_shown:
        warnings.append("no overlap of communication was measured; the interval reaches to none at all")
    residuals = []
    for phase, cost in zip(base.sent.phases, base.costs, strict=True):
        residuals.append(cost.residual_percent)
        warnings += cost.warnings
        largest = float(phase.sizes.sum())
        known = [m.largest_bytes for m in base.network.cluster.measured if m.operation == phase.operation]
        if known and largest > 2 * max(known):
            residuals[-1] += 5 * math.log2(largest / max(known))
            warnings.append(f"{phase.operation}s of more than {max(known)} bytes were not measured")
    if base.sent.told:
        warnings.append(base.sent.told)
    if not base.network.cluster.measured:
        warnings.append(f"no collective has been measured on {base.network.cluster.name}: its links are taken as rated")
    if base.compression.method not in ("none", "fp16") and base.compression_s is None:
        residuals[-1] += 10
        warnings.append(f"what {base.compression.method} costs to compute is counted, not measured")
    return compute / 100, max(residuals) / 100, list(dict.fromkeys(warnings))


def _sent(base: Case) -> int:
    return round(sum(float(phase.sizes.sum()) for phase in base.sent.phases) / base.every) * (base.network.ranks > 1)


def _memory(workload: Workload, base: Case) -> float | None:
    if not workload.fixed_memory_bytes:
        return None
    buffers = base.threshold_bytes if base.rules.fuses and base.network.ranks > 1 else 0.0
    return (workload.fixed_memory_bytes + workload.activation_bytes * base.batch + buffers) / 2**20


def _room(workload: Workload, base: Case) -> list[str]:
    needed, has = _memory(workload, base), base.network.cluster.device.memory_mib
    if needed is None or has is None or not workload.activation_bytes or needed <= has:
        return []
    return [f"needs about {needed:.0f} MiB a device, which has {has:.0f}: choose a smaller batch"]
