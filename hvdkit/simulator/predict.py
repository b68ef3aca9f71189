"""`hvdkit predict`: step times at any number of ranks, from a profile and a cluster file, and what bounds them.

Each step time has an interval. It reflects how well the measured collectives are fitted and the model's error on the
profile's own step. It grows with every difference from what was measured, and each difference gives a warning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from hvdkit.errors import RequestError
from hvdkit.results.json_files import Result
from hvdkit.results.profile import Profile
from hvdkit.simulator import doubt, engine, refusals, step
from hvdkit.simulator.calibration import Calibration, calibrate
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.engine import StepSchedule
from hvdkit.simulator.piecewise_linear import Floats
from hvdkit.simulator.settings import Settings
from hvdkit.simulator.step import Case
from hvdkit.tasks import few_samples

SAMPLES = 64  # of the slowest rank's compute, one from each of as many equal parts of its distribution
MOST_RANKS = 10**9
_ITERATIONS = 10  # of the schedule that is drawn
_LONG_WAIT = 0.2  # the fraction of a step spent waiting for the slowest rank that gives a warning
_KINDS = {
    **dict.fromkeys(("forward", "backward", "update", "compression"), "compute"),
    **dict.fromkeys(("read", "decode", "copy"), "input"),
    "gap": "gaps",
    "fusion": "communication",
}


class ResultPart(BaseModel):
    """A part of `predict.json` or `advise.json`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Critical(ResultPart):
    """A task of the critical path. `start_ms` counts from the end of the step before, and can be negative."""

    task: str
    kind: str
    resource: str | None
    start_ms: float
    ms: float


class Point(ResultPart):
    """The prediction for one number of ranks. The step time is expected from `low_ms` to `high_ms`.

    `efficiency` is relative to as many ranks without communication. `exposed_communication_ms` is what a network
    without any delay would save; `waiting_ms` is the time that ranks wait for the slowest. `utilisation` is busy
    time over step time by resource. `bytes_per_step` is what a rank puts into collectives. `bound` is the largest
    part of the critical path, but waiting instead of compute if that is more than a fifth of the step. `memory_mib`
    is of a rank, and `memory_parts_mib` of what it consists; None if it is unknown. `unit` is what
    `images_per_second` counts, such as tokens; `batch_size` counts samples.
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
    memory_parts_mib: dict[str, float] | None
    critical_path: list[Critical]
    warnings: list[str]
    unit: str = "images"


class Prediction(ResultPart, Result):
    """`predict.json`."""

    schema_version: Literal[1] = 1
    model: str
    profile: str
    cluster: str
    settings: dict[str, object]
    measured_step_ms: float
    check_percent: float | None
    points: list[Point]

    def records(self) -> list[dict[str, Any]]:
        """A row for each number of ranks."""
        nested = {"utilisation", "critical_path", "warnings", "memory_parts_mib"}
        return [point.model_dump(exclude=nested) for point in self.points]


def predict(profile: Profile, cluster: Cluster, ranks: Sequence[int], settings: Settings) -> Prediction:
    """The predictions on a cluster to which the link settings have been applied (`settings.applied`).

    Raises RequestError if the cluster has no room for a number of ranks, or no machine could run a what-if.
    """
    fitted, numbers = calibrate(profile), checked(ranks, cluster)
    refusals.check(fitted, cluster, numbers, settings)
    points = [point(fitted, cluster, number, settings) for number in numbers]
    for row in points:
        row.warnings.extend(of_batch_norm(profile, row))
    return Prediction(
        model=profile.model,
        profile=source(profile),
        cluster=cluster.name,
        settings=settings.model_dump(exclude_defaults=True),
        measured_step_ms=profile.step.step_ms.mean,
        check_percent=fitted.check_percent,
        points=points,
    )


def of_batch_norm(profile: Profile, point: Point) -> list[str]:
    """What a prediction leaves out of batch norm."""
    model = profile.settings.get("model") or {}
    if model.get("batch_norm") == "synchronized":
        return ["the collectives of synchronized batch norm are taken to be part of compute, as they were measured"]
    return few_samples.warning(profile.model, model.get("batch_norm"), point.batch_size, point.ranks)


def source(profile: Profile) -> str:
    """What a profile is of, in a line."""
    measured = f"{profile.framework} {profile.framework_version}, {profile.np} ranks, batch {profile.batch_size}"
    return profile.published or measured


def checked(ranks: Sequence[int], cluster: Cluster | None) -> list[int]:
    """The numbers of ranks, each once. Raises RequestError for one that the cluster, if known, has no room for."""
    most = min(MOST_RANKS, (cluster.largest if cluster else None) or MOST_RANKS)
    for number in ranks:
        if not 1 <= number <= most:
            where = f" on cluster {cluster.name}" if cluster else ""
            raise RequestError(f"-n {number}: expected at least 1 and at most {most} ranks{where}")
    return list(dict.fromkeys(ranks))


def point(fitted: Calibration, cluster: Cluster, ranks: int, settings: Settings) -> Point:
    """The prediction for one number of ranks, on a cluster as `predict` takes it."""
    base = fitted.case(cluster, ranks, settings)
    drawn = cases(fitted, base, settings)
    factors, warnings = drawn.factors, drawn.warnings
    mean = float(factors.mean())
    middle = replace(base, slow=mean)
    sampled = [replace(base, slow=float(factor)) for factor in factors] if mean > 1 else []
    steady = engine.run(step.detailed(middle))
    bounds = len(drawn.bounds)
    periods = step.periods([*drawn.bounds, *sampled])
    spread = periods[bounds:] if sampled else np.array([steady.period])
    seconds = float(spread.mean())
    alone = step.period(base.alone)
    slow_alone = step.period(middle.alone)
    low, high = drawn.interval(seconds, alone, [float(period) for period in periods[:bounds]])
    waiting = max(0.0, slow_alone - alone)
    if waiting > _LONG_WAIT * seconds:
        warnings.append(
            f"{100 * waiting / seconds:.0f} % of the step is waiting for the slowest rank, as compute is assumed to "
            f"vary by {100 * _jitter(fitted, cluster, settings):.0f} % from step to step; profile on a quiet machine, "
            "or try --set jitter=0.02"
        )
    batch = base.batch * fitted.workload.batch_size
    sent = sum(float(phase.sizes.sum()) for phase in base.traffic.phases) + base.gathered_bytes
    return Point(
        ranks=ranks,
        batch_size=round(batch),
        policy=base.policy if base.every == 1 else "local-sgd",
        algorithm=", ".join(dict.fromkeys(cost.algorithm for cost in base.costs)),
        step_ms=1e3 * seconds,
        low_ms=1e3 * low,
        high_ms=1e3 * high,
        p99_ms=1e3 * float(np.quantile(spread, 0.99)),
        images_per_second=ranks * batch * fitted.workload.units_per_sample / seconds,
        efficiency=min(1.0, alone / seconds),
        exposed_communication_ms=1e3 * max(0.0, seconds - slow_alone),
        waiting_ms=1e3 * waiting,
        bytes_per_step=round(sent / base.every) * (ranks > 1),
        utilisation={name: float(busy) / float(steady.period) for name, busy in steady.busy().items()},
        bound=bound(steady, waiting, _LONG_WAIT * seconds),
        memory_mib=refusals.memory_mib(base),
        memory_parts_mib=refusals.memory_parts_mib(base),
        critical_path=critical(steady),
        warnings=warnings,
        unit=fitted.workload.unit,
    )


@dataclass(frozen=True)
class Cases:
    """What a prediction is made of: samples of the slowest rank's factor, and the cases that bound its interval.

    `near` is the mean factor of no more ranks than were profiled. `bounds` are the fastest and the slowest case; the
    expected, fastest and slowest case with the batch size and the device of the profile, if those are others; and a
    case without overlap, if the profile does not show any. Backward hides at most `hideable_s` of communication;
    `own_compute` has compute and backward of the profile's batch size and device, if those are others.
    """

    factors: Floats
    near: float
    bounds: list[Case]
    overlap_shown: bool
    hideable_s: float
    own_compute: list[tuple[float, float]]
    warnings: list[str]

    def interval(self, seconds: float, alone: float, periods: Sequence[float]) -> tuple[float, float]:
        """The shortest and longest step, for an expected one of `seconds`; `periods` are those of `bounds`.

        `alone` is the step without communication. Relative to the step, the interval is no narrower than that of the
        profile's own batch size and device, and no narrower than that of fewer ranks without overlap.
        """
        low, high, *others = periods
        shorter, longer = max(1.0, seconds / low), max(1.0, high / seconds)
        if not self.overlap_shown:
            *others, serial = others
            compute = alone * float(self.factors.mean())
            sent = max(0.0, serial - compute)
            longer = max(longer, serial / seconds)
            for own_s, hideable in ((compute, self.hideable_s), *self.own_compute):
                longer = max(longer, 1 + min(sent, hideable) / own_s if own_s > 0 else 1.0)
        if others:
            middle, low, high = others
            shorter, longer = max(shorter, middle / low), max(longer, high / middle)
        return seconds / shorter, seconds * longer


def cases(fitted: Calibration, base: Case, settings: Settings) -> Cases:
    """The cases that give a prediction for `base` and its interval."""
    ranks, jitter = base.network.ranks, _jitter(fitted, base.network.cluster, settings)
    factors = slowest(ranks, base.every, jitter, settings.seed)
    mean = float(factors.mean())
    # That more ranks than were profiled wait longer, because each varies on its own, was not measured.
    near = float(slowest(min(ranks, fitted.ranks), base.every, jitter, settings.seed).mean())
    doubts = doubt.expected(fitted, base)

    def ends(case: Case) -> list[Case]:
        return [
            replace(case, slow=near / doubts.faster, wire=1 / doubts.wire_faster),
            replace(case, slow=mean * doubts.slower, wire=doubts.wire_slower),
        ]

    bounds, work, compute = ends(base), base.workload, []
    if (base.batch, base.speed) != (1, 1):
        own = replace(base, slow=mean, batch=1.0, speed=1.0)
        bounds += [own, *ends(own)]
        compute = [(mean * (work.compute_s + work.update_s) + work.serial_s, mean * work.parts(1.0).backward_s)]
    # If the profile shows no overlap, the interval includes a step without any.
    shown = not base.rules.overlaps or (base.policy == fitted.known.policy and fitted.overlap_shown)
    if not shown:
        bounds.append(replace(base, slow=mean, policy="grouped"))
    hideable_s = mean * base.work * base.parts.backward_s
    return Cases(factors, near, bounds, shown, hideable_s, compute, list(doubts.warnings))


def schedule(fitted: Calibration, cluster: Cluster, ranks: int, settings: Settings) -> StepSchedule:
    """Steps of the slowest rank, with every layer and bucket, for the same case as `point`."""
    base = fitted.case(cluster, ranks, settings)
    factors = slowest(ranks, base.every, _jitter(fitted, cluster, settings), settings.seed)
    return engine.run(step.detailed(replace(base, slow=float(factors.mean()))), _ITERATIONS)


@lru_cache(maxsize=1024)
def slowest(ranks: int, every: int, jitter: float, seed: int) -> Floats:
    """Samples of the slowest rank's compute time relative to the mean, shape (SAMPLES,), from the seed.

    Compute is log-normal with the coefficient of variation `jitter`, independent for each rank. The quantile u of the
    largest of n is the quantile u^(1/n) of one, so a million ranks cost no more than two. With Local SGD ranks wait
    after the sum of `every` steps.
    """
    if jitter == 0 or ranks == 1:
        return np.ones(1)
    random = np.random.default_rng(seed)
    levels = (np.arange(SAMPLES) + random.random(SAMPLES)) / SAMPLES
    sigma = math.sqrt(math.log1p(jitter**2 / every))
    normal = NormalDist()
    # for many ranks u^(1/n) rounds to 1, but 1 - u^(1/n) is exact
    above = -np.expm1(np.log(levels) / ranks)
    return np.array([math.exp(-sigma * normal.inv_cdf(value) - sigma**2 / 2) for value in above])


def bound(schedule: StepSchedule, waiting: float = 0.0, most: float = math.inf) -> str:
    """What most of the critical path is: compute, communication, negotiation, input, waiting, gaps (between steps).

    `waiting` are the seconds of compute that the slowest rank takes longer than the others. More than `most` of them
    count before compute.
    """
    seconds: dict[str, float] = {}
    for span in schedule.critical_path():
        kind = _KINDS.get(span.task.kind, span.task.kind)
        seconds[kind] = seconds.get(kind, 0.0) + span.end - span.start
    seconds["compute"] = seconds.get("compute", 0.0) - waiting
    seconds["waiting"] = waiting
    largest = max(seconds, key=lambda kind: seconds[kind])
    return "waiting" if largest == "compute" and waiting > most else largest


def critical(schedule: StepSchedule) -> list[Critical]:
    """The critical path of the last step, in milliseconds."""
    begin = float(schedule.ends[-2][-1]) if len(schedule.ends) > 1 else 0.0
    return [
        Critical(
            task=span.task.name,
            kind=span.task.kind,
            resource=span.task.resource,
            start_ms=1e3 * (span.start - begin),
            ms=1e3 * (span.end - span.start),
        )
        for span in schedule.critical_path()
    ]


def _jitter(fitted: Calibration, cluster: Cluster, settings: Settings) -> float:
    if settings.jitter is not None:
        return settings.jitter
    return max(fitted.workload.jitter, cluster.jitter)
