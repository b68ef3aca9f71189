"""The expected step of a case and its interval, each from cases that are simulated together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hvdkit.simulator import doubt, step
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.doubt import Doubt
from hvdkit.simulator.jitter import slowest
from hvdkit.simulator.piecewise_linear import Floats
from hvdkit.simulator.step import Case

FEW_SAMPLES = 4  # of many what-ifs at once


@dataclass(frozen=True)
class Ensemble:
    """The cases that are simulated for the prediction of `base`.

    `factors` are samples of the slowest rank's, `crowded` times those of ranks that have a host each (`crowding`).
    `near` is their mean for no more ranks than were profiled, without crowding. `bounds`
    are the fastest and the slowest case (`low`, `high`); with a batch size or a device that is not the profile's, the
    same with the profile's (`own`, `own low`, `own high`); and a case without overlap (`serial`), if the profile does
    not show any. Backward hides at most `hideable_s` of communication; `own_compute` has compute and backward of the
    profile's batch size and device, if those are others.
    """

    base: Case
    factors: Floats
    crowded: float
    near: float
    bounds: dict[str, Case]
    hideable_s: float
    own_compute: list[tuple[float, float]]
    doubts: Doubt

    @property
    def slow(self) -> float:
        """The slowest rank's mean factor."""
        return float(self.factors.mean())

    def off(self, seconds: float, alone: float, periods: Mapping[str, float]) -> tuple[float, float]:
        """By what factors a step that is expected to take `seconds` may be shorter and longer.

        `alone` is the step without communication, `periods` are those of `bounds`. The factors are no smaller than with
        the profile's own batch size and device, nor than that of fewer ranks without overlap.
        """
        shorter, longer = max(1.0, seconds / periods["low"]), max(1.0, periods["high"] / seconds)
        if serial := periods.get("serial"):
            compute = alone * self.slow
            longer, sent = max(longer, serial / seconds), max(0.0, serial - compute)
            for own_s, hideable_s in ((compute, self.hideable_s), *self.own_compute):
                longer = max(longer, 1 + min(sent, hideable_s) / own_s if own_s > 0 else 1.0)
        if own := periods.get("own"):
            shorter, longer = max(shorter, own / periods["own low"]), max(longer, periods["own high"] / own)
        return shorter, longer


def ensemble(fitted: Calibration, base: Case) -> Ensemble:
    """The cases that give a prediction for `base` and its interval."""
    ranks, how = base.data_ranks, (base.every, base.jitter, base.seed)
    crowded = fitted.crowding(base)
    factors = crowded * slowest(ranks, *how)
    mean = float(factors.mean())
    # That more ranks than were profiled wait longer, because each varies on its own, was not measured.
    near = float(slowest(min(ranks, fitted.ranks), *how).mean())
    doubts = doubt.expected(fitted, base)

    def ends(case: Case) -> tuple[Case, Case]:
        # As uncertain as compute, of which ranks may wait for none of the slowest.
        low = replace(case, slow=near / doubts.faster, wire=min(1.0, near / mean) / doubts.wire_faster)
        return low, replace(case, slow=mean * doubts.slower, wire=doubts.wire_slower)

    bounds, work, compute = dict(zip(("low", "high"), ends(base), strict=True)), base.workload, []
    if (base.batch, base.speed) != (1, 1):
        own = replace(base, slow=mean, batch=1.0, speed=1.0)
        bounds |= zip(("own", "own low", "own high"), (own, *ends(own)), strict=True)
        compute = [(mean * (work.compute_s + work.update_s) + work.serial_s, mean * work.parts(1.0).backward_s)]
    # If the profile shows no overlap, the interval includes a step without any.
    if base.rules.overlaps and not (base.policy == fitted.known.policy and fitted.overlap_shown):
        bounds["serial"] = replace(base, slow=mean, policy="grouped")
    hideable_s = mean * base.work * base.parts.backward_s
    return Ensemble(base, factors, crowded, near, bounds, hideable_s, compute, doubts)


@dataclass(frozen=True)
class Forecast:
    """The step of a case, in seconds: `spread` has samples of it, `alone` is the step without communication."""

    drawn: Ensemble
    spread: Floats
    low: float
    high: float
    alone: float

    @property
    def seconds(self) -> float:
        """The expected step."""
        return float(self.spread.mean())

    def figures(self) -> dict[str, Any]:
        """What a `Point` and a row of a sweep both have."""
        case, work = self.drawn.base, self.drawn.base.workload
        return {
            "ranks": case.network.ranks,
            "batch_size": round(case.batch * case.accumulate * work.batch_size),
            "step_ms": 1e3 * self.seconds,
            "low_ms": 1e3 * self.low,
            "high_ms": 1e3 * self.high,
            "images_per_second": case.samples * work.units_per_sample / self.seconds,
            "efficiency": min(1.0, self.alone / self.seconds),
        }


def forecasts(fitted: Calibration, bases: Sequence[Case], samples: int = FEW_SAMPLES) -> list[Forecast]:
    """The steps of all of them, simulated at once, with at most so many samples of the slowest rank.

    The step time is nearly linear in the samples, so means of equal parts of them change it by less than a thousandth;
    or by less than a hundredth where the slowest rank's gradients just reach a cycle of Horovod, or just miss it.

    An interval is no narrower, relative to the step, than those of 1, 2, 4, … fewer ranks.
    """
    lone = {_lone(base): base.alone for base in bases}
    alone = dict(zip(lone, step.periods(list(lone.values())), strict=True))
    simulated: list[Case] = []
    wanted: list[list[Ensemble]] = []
    for base in bases:
        counts = (2**power for power in range((base.network.ranks - 1).bit_length()))
        networks = (base.network, *map(base.network.of_ranks, counts))
        wanted.append([ensemble(fitted, replace(base, network=network)) for network in networks])
        drawn = wanted[-1][0]
        groups = np.array_split(drawn.factors, min(samples, len(drawn.factors)))
        simulated += [replace(base, slow=float(group.mean())) for group in groups]
        for less in wanted[-1]:
            simulated += [replace(less.base, slow=less.slow), *less.bounds.values()]
    periods, made = iter(map(float, step.periods(simulated))), []
    for drawn, *fewer in wanted:
        spread = np.array([next(periods) for _ in range(min(samples, len(drawn.factors)))])
        seconds, without, off = float(spread.mean()), float(alone[_lone(drawn.base)]), []
        for less in (drawn, *fewer):
            middle = next(periods)
            bounds = {name: next(periods) for name in less.bounds}
            off.append(less.off(seconds if less is drawn else middle, without, bounds))
        shorter, longer = map(max, zip(*off, strict=True))
        # Never above linear scaling; and what was measured lies inside, in spite of rounding.
        low = max(seconds / shorter, (1 - 1e-9) * without / drawn.doubts.unlike)
        made.append(Forecast(drawn, spread, low, seconds * longer, without))
    return made


def _lone(case: Case) -> tuple[object, ...]:
    """All that the step without communication depends on: it is the same for many."""
    return case.workload, case.network.cluster.device, case.rules, case.batch, case.accumulate, case.speed, case.every
