"""`hvdkit predict`: step times at any number of ranks, from a profile and a cluster file, and what bounds them.

Each step time has an interval. It reflects how well the measured collectives are fitted and the model's error on the
profile's own step. It grows with every difference from what was measured, and each difference gives a warning.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict

from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Recipe
from hvdkit.results.json_files import Result
from hvdkit.results.profile import Profile
from hvdkit.simulator import case_memory, divided, engine, memory, refusals, step
from hvdkit.simulator.calibration import Calibration, calibrate
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.engine import StepSchedule
from hvdkit.simulator.forecast import Forecast, forecasts
from hvdkit.simulator.jitter import SAMPLES, slowest
from hvdkit.simulator.settings import Settings
from hvdkit.tasks import few_samples

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
    memory_by_stage_mib: list[float] | None = None


class Prediction(ResultPart, Result, file="predict.json"):
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
        """A row for each number of ranks, without the critical path."""
        of = {"model": self.model, "cluster": self.cluster}
        return [of | point.model_dump(exclude={"critical_path"}) for point in self.points]


def predict(profile: Profile, cluster: Cluster, ranks: Sequence[int], settings: Settings) -> Prediction:
    """The predictions on a cluster to which the link settings have been applied (`settings.applied`).

    Raises RequestError if the cluster has no room for a number of ranks, or no machine could run a what-if.
    """
    fitted, numbers = calibrate(profile), checked(ranks, cluster)
    if settings.parallel is not None:
        recipe = divided.recipe_of(profile, settings)
        points = [_divided_point(profile, fitted, recipe, cluster, number, settings.speed) for number in numbers]
    else:
        refusals.check(fitted, cluster, numbers, settings)
        points = [point(fitted, cluster, number, settings) for number in numbers]
        for one in points:
            one.warnings.extend(of_batch_norm(profile, one))
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
            if cluster and cluster.one_host:
                where += (
                    ", which has the memory of one host alone: raise its ranks_per_host if the host has room for more, "
                    "or add a link to others, such as by `hvdkit bench allreduce -H … --add-to FILE`"
                )
            raise RequestError(f"-n {number}: expected at least 1 and at most {most} ranks{where}")
    return list(dict.fromkeys(ranks))


def point(fitted: Calibration, cluster: Cluster, ranks: int, settings: Settings) -> Point:
    """The prediction for one number of ranks, on a cluster as `predict` takes it."""
    return point_of(fitted, *forecasts(fitted, [fitted.case(cluster, ranks, settings)], SAMPLES))


def point_of(fitted: Calibration, expected: Forecast) -> Point:
    """The prediction of which the times are known."""
    drawn, base = expected.drawn, expected.drawn.base
    ranks = base.network.ranks
    middle = replace(base, slow=drawn.slow)
    steady = engine.run(step.detailed(middle))
    begin = float(steady.ends[-2][-1]) if len(steady.ends) > 1 else 0.0  # of the last step
    seconds, slow_alone = expected.seconds, step.period(middle.alone)
    waiting = max(0.0, slow_alone - expected.alone * drawn.crowded)
    warnings = list(drawn.doubts.warnings)
    if waiting > _LONG_WAIT * seconds:
        warnings.append(
            f"{100 * waiting / seconds:.0f} % of the step is waiting for the slowest rank, as compute is assumed to "
            f"vary by {100 * base.jitter:.0f} % from step to step; profile on a quiet machine, "
            "or try --set jitter=0.02"
        )
    sent = sum(float(phase.sizes.sum()) for phase in base.traffic.phases) + base.gathered_bytes
    needed = case_memory.need(base)
    return Point(
        **expected.figures(),
        policy=base.policy if base.every == 1 else "local-sgd",
        algorithm=", ".join(dict.fromkeys(cost.algorithm for cost in base.costs)),
        p99_ms=1e3 * float(np.quantile(expected.spread, 0.99)),
        exposed_communication_ms=1e3 * max(0.0, seconds - slow_alone),
        waiting_ms=1e3 * waiting,
        bytes_per_step=round(sent / base.every) * (ranks > 1),
        utilisation={name: float(busy) / float(steady.period) for name, busy in steady.busy().items()},
        bound=bound(steady, waiting, _LONG_WAIT * seconds),
        memory_mib=needed and needed.total / 2**20,
        memory_parts_mib=needed and needed.parts and {name: size / 2**20 for name, size in needed.parts.items()},
        critical_path=[
            Critical(
                task=span.task.name,
                kind=span.task.kind,
                resource=span.task.resource,
                start_ms=1e3 * (span.start - begin),
                ms=1e3 * (span.end - span.start),
            )
            for span in steady.critical_path()
        ],
        warnings=warnings,
        unit=fitted.workload.unit,
    )


def _divided_point(
    profile: Profile, fitted: Calibration, recipe: Recipe, cluster: Cluster, ranks: int, speed: float
) -> Point:
    """The prediction for ranks that divide the model. Raises RequestError if the mesh is not one of so many ranks."""
    way = divided.divided(fitted, profile.settings, recipe, cluster, ranks, speed)
    if way is None:
        raise RequestError("parallel: expected a profile of a ResNet or a GPT whose samples have a known size")
    step, data = way.step(), recipe.data_ranks(ranks)
    low, high = divided.interval(fitted, step)
    parts = divided.memory_of(recipe, memory.framework_of(profile.framework), not fitted.on_cpu, ranks)
    most, axes = max(parts, key=lambda one: one.total), recipe.parallel
    waiting, sent = step.bubble * step.passes_s, step.tensor_s + step.data_s
    kinds = {"communication": sent, "waiting": waiting, "compute": step.seconds - sent - waiting}
    room, total = cluster.device.memory_mib, most.total / 2**20
    warnings = ["the time of a divided model is from its table and one measured step: an estimate"]
    if room is not None and total > room:
        warnings.append(f"does not fit: {total:,.0f} MiB, {cluster.device.name} has {room:,.0f}")
    return Point(
        ranks=ranks,
        batch_size=recipe.batch_size,
        policy=axes.schedule if axes.pipeline > 1 else "grouped",
        algorithm=f"{data} × {axes.pipeline} × {axes.tensor}",
        step_ms=1e3 * step.seconds,
        low_ms=1e3 * low,
        high_ms=1e3 * high,
        p99_ms=1e3 * high,
        images_per_second=data * way.microbatches * way.samples * fitted.workload.units_per_sample / step.seconds,
        efficiency=max(0.0, kinds["compute"]) / step.seconds,
        exposed_communication_ms=1e3 * sent,
        waiting_ms=1e3 * waiting,
        bytes_per_step=round(max(map(way.parameters, range(axes.pipeline))) * way.chain.gradient_bytes) * (data > 1),
        utilisation={kind: max(0.0, seconds) / step.seconds for kind, seconds in kinds.items()},
        bound=max(kinds, key=lambda kind: kinds[kind]),
        memory_mib=total,
        memory_parts_mib={name: value / 2**20 for name, value in most if value},
        critical_path=[],
        warnings=warnings,
        unit=fitted.workload.unit,
        memory_by_stage_mib=[one.total / 2**20 for one in parts],
    )


def schedule(fitted: Calibration, cluster: Cluster, ranks: int, settings: Settings) -> StepSchedule:
    """Steps of the slowest rank, with every layer and bucket, for the same case as `point`."""
    base = fitted.case(cluster, ranks, settings)
    factors = fitted.crowding(base) * slowest(ranks, base.every, base.jitter, base.seed)
    return engine.run(step.detailed(replace(base, slow=float(factors.mean()))), _ITERATIONS)


def bound(schedule: StepSchedule, waiting: float = 0.0, most: float = math.inf) -> str:
    """What most of the critical path is: compute, communication, negotiation, input, waiting, gaps (between steps).

    `waiting` are the seconds of compute that the slowest rank takes longer than the others. More than `most` of them
    count before compute.
    """
    seconds = defaultdict[str, float](float, compute=-waiting, waiting=waiting)
    for span in schedule.critical_path():
        seconds[_KINDS.get(span.task.kind, span.task.kind)] += span.end - span.start
    largest = max(seconds, key=lambda kind: seconds[kind])
    return "waiting" if largest == "compute" and waiting > most else largest
