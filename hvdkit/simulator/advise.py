"""`hvdkit advise`: predicts each change, and ranks the changes by gain, with their costs and risks.

Software comes before hardware, since it is cheaper. A gain has an interval of its own: the errors of compute and
communication are the same before and after the change, so they partly cancel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import Field

from hvdkit.results.json_files import Result
from hvdkit.results.profile import Profile
from hvdkit.simulator import candidates, case_memory, doubt, plans, refusals, step
from hvdkit.simulator.calibration import Calibration, calibrate
from hvdkit.simulator.candidates import MOST_RANKS, Candidate, Kind
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.compression_costs import SELECTION_TOLD
from hvdkit.simulator.doubt import guesses
from hvdkit.simulator.forecast import Forecast, ensemble, forecasts
from hvdkit.simulator.jitter import SAMPLES
from hvdkit.simulator.money import Money
from hvdkit.simulator.plans import Plans
from hvdkit.simulator.predict import Point, ResultPart, checked, of_batch_norm, point, point_of
from hvdkit.simulator.settings import Settings
from hvdkit.simulator.step import Case

_LEAST_GAIN = 1.005  # a smaller gain is not reported
_LESS_MEMORY = 0.95  # of today's, above which a change makes no room
_GROWS = 1.1  # the gain of twice the ranks, below which they are not worth it
_OF_EVIDENCE = ("resnet20", "mnist5k")  # the task whose losses of accuracy evidence.yaml has; others are not foreseen
_ALONE = frozenset({"batch_size", "accumulate", "precision", "recompute", "sharding"})  # keys
_BOTH = 1.05  # the gain of compression with Local SGD over the better one of them, below which one is enough


class Evidence(NamedTuple):
    """An entry of evidence.yaml."""

    known: str
    measured: str | None = None
    points_lost: float | None = None


class Suggestion(ResultPart):
    """One change. `gain` is the speed relative to today's, expected from `gain_low` to `gain_high`.

    `sure` says that `gain_low` is a gain too, that nothing is a guess, and that device, links, batch size and what the
    compression computes are not other than those that the profile or the cluster file has.
    `settings` are for `--set`; `recipe` is what `--new-recipe` writes, None if no key of the recipe does it.
    Costs are of whole hosts, in `currency`, at the price per
    GPU-hour; they and the times of an epoch and of the training are None if samples, epochs or price are unknown.
    `images_per_second` and `cost_per_million_images` count the unit of `Advice.today`. `saved` is the cost of training
    that the change saves, None if it is not in today's currency. `risk` is what is known about its accuracy;
    `points_lost` is the measured loss of it in percentage points, None if it was not measured on this model and data.
    `memory_mib` is of a rank, None if it is unknown.
    """

    kind: Kind
    what: str
    settings: dict[str, Any]
    recipe: dict[str, Any] | None
    ranks: int
    step_ms: float
    images_per_second: float
    gain: float
    gain_low: float
    gain_high: float
    sure: bool
    epoch_s: float | None
    train_s: float | None
    epoch_cost: float | None
    train_cost: float | None
    cost_per_million_images: float | None
    currency: str | None
    saved: float | None
    points_lost: float | None
    effort: str
    risk: str
    warnings: list[str]
    memory_mib: float | None = None


class Adding(ResultPart):
    """What more ranks bring: `points` has (units per second, efficiency) by number of ranks, as `predict` has it.

    Twice as many ranks as `most` bring less than a tenth more; None if they bring more everywhere. `loses` are the
    numbers of ranks that are slower than a smaller number.
    """

    points: dict[int, tuple[float, float]]
    most: int | None
    loses: list[int]
    told: str


class Advice(ResultPart, Result, file="advise.json"):
    """`advise.json`; `suggestions` are software first, of each kind what is sure, then usual remedies, then by gain.

    `guesses` are what all of it takes for granted; `money` says what a device costs, or why that is unknown. `plans`
    are the ways to train within a budget or until a deadline, if one is given. `left_out` has the changes that no
    machine could run, and those of which published tables say that they are a loss, and why. `room_mib` is what a rank
    may fill of its device, and `smaller` are changes that need less of it, the least loss of speed first.
    """

    schema_version: Literal[1] = 1
    model: str
    cluster: str
    guesses: list[str]
    price_per_gpu_hour: float | None
    currency: str | None
    money: str
    today: Point
    plans: Plans | None
    suggestions: list[Suggestion]
    adding: Adding
    left_out: dict[str, str]
    room_mib: float | None = None
    smaller: list[Suggestion] = Field([])

    def records(self) -> list[dict[str, Any]]:
        """A row for each suggestion, with its settings as `--set` takes them."""
        return [
            change.model_dump(exclude={"recipe"})
            | {"settings": [f"{key}={value}" for key, value in change.settings.items()]}
            for change in self.suggestions
        ]


def advise(profile: Profile, cluster: Cluster, ranks: int, settings: Settings, money: Money) -> Advice:
    """All suggestions.

    Raises RequestError if the cluster has no room for the ranks, no machine could run the settings, or an epoch has
    fewer samples than a step takes.
    """
    checked([ranks], cluster)
    fitted = calibrate(profile)
    refusals.check(fitted, cluster, [ranks], settings)
    today = point(fitted, cluster, ranks, settings)
    today.warnings.extend(of_batch_norm(profile, today))
    money.check(today.step_ms, today.batch_size, ranks)
    now = Candidate("software", "today", settings, {}, cluster, ranks)
    taken, before = guesses(fitted, cluster, settings.speed), money.of(today.step_ms, today.batch_size, ranks)
    left_out: dict[str, str] = {}
    case = fitted.case(cluster, ranks, settings)
    data = profile.settings.get("data")
    same_task = (profile.model, data.get("name") if isinstance(data, dict) else None) == _OF_EVIDENCE

    def suggested(changes: Iterable[Candidate], least: float = _LEAST_GAIN) -> list[tuple[Candidate, Suggestion]]:
        """The changes that a machine can run, which bring at least so much, and for which an epoch has samples enough.

        All are simulated at once, which is much quicker than one after the other.
        """
        possible, cases = [], []
        for one in changes:
            after_case = fitted.case(one.cluster, one.ranks, one.settings)
            if fault := refusals.refusal(after_case, one.settings):
                left_out[one.what] = fault
            else:
                possible.append(one)
                cases.append(after_case)
        after = zip(possible, forecasts(fitted, cases, SAMPLES), strict=True)
        return [(one, made) for one, expected in after if (made := suggestion(one, expected, least))]

    def suggestion(change: Candidate, expected: Forecast, least: float) -> Suggestion | None:
        figures, after_case = expected.figures(), expected.drawn.base
        gain = figures["images_per_second"] / today.images_per_second
        if gain < 1 and after_case.assumes_selection:
            left_out[change.what] = f"{100 * (1 - gain):.0f} % slower: {SELECTION_TOLD}, longer than it saves to send"
        if gain < least or not money.fits(figures["batch_size"], change.ranks):
            return None
        after, (low, high) = point_of(fitted, expected), gains(fitted, now, change, gain)
        paid = money.at(change.cluster) if change.other_machines else money
        bill, risk = paid.of(after.step_ms, after.batch_size, change.ranks), _risk(change.evidence, same_task)
        saved = None
        if paid.currency == money.currency and before.train_cost is not None and bill.train_cost is not None:
            saved = before.train_cost - bill.train_cost
        return Suggestion(
            kind=change.kind,
            what=change.what,
            settings=change.changed,
            recipe=change.recipe,
            **after.model_dump(include={"ranks", "step_ms", "images_per_second", "warnings", "memory_mib"}),
            **bill._asdict(),
            gain=gain,
            gain_low=low,
            gain_high=high,
            sure=not taken and low > 1 and _as_before(case, after_case),
            currency=None if paid.price is None else paid.currency,
            saved=saved,
            points_lost=risk[1],
            effort=change.effort,
            risk=risk[0],
        )

    pairs = sorted(suggested(candidates.software(fitted, now)), key=lambda pair: -pair[1].gain)
    together = _together(fitted, now, [one for one, _ in pairs])
    usual = {change.what for change, _ in pairs if change.usual}
    software = [change for _, change in [*(suggested([together]) if together else ()), *pairs]]
    less = [made for _, made in suggested(candidates.smaller(fitted, now), 0.0)]
    needed, room = today.memory_mib or 0.0, case_memory.room_bytes(case)
    less = [made for made in less if room and made.memory_mib and made.memory_mib < _LESS_MEMORY * needed]
    hardware = [made for _, made in suggested(candidates.hardware(now))]
    return Advice(
        model=profile.model,
        cluster=cluster.name,
        guesses=taken,
        price_per_gpu_hour=money.price,
        currency=None if money.price is None else money.currency,
        money=money.told,
        today=today,
        plans=plans.search(fitted, now, money) if money.limited else None,
        suggestions=[
            *sorted(software, key=lambda e: (not e.sure, e.what not in usual, -e.gain)),
            *sorted(hardware, key=lambda e: (not e.sure, -e.gain)),
        ],
        adding=_adding(fitted, now, today, money),
        left_out=left_out,
        room_mib=room / 2**20 if needed and room else None,
        smaller=sorted(less, key=lambda e: -e.gain),
    )


def _as_before(today: Case, case: Case) -> bool:
    """Whether a change has today's work of a rank, device and links, a batch size, a compression whose compute and
    averages whose distance are known; and no more ranks than today or than a collective was measured on."""
    work = case.workload
    sizes = work.curve.sizes if work.curve else (float(work.batch_size),)
    known = case.compression.method in ("none", "fp16") or case.compression_s is not None
    same = case.speed == today.speed and case.network.cluster.levels == today.network.cluster.levels
    as_often = case.every == today.every and work is today.workload
    ranks = max([today.data_ranks, *(row.ranks for row in case.network.cluster.measured)])
    return same and as_often and case.data_ranks <= ranks and round(case.batch * work.batch_size) in sizes and known


@cache
def evidence() -> dict[str, Evidence]:
    """By method, what is known about its accuracy."""
    document = yaml.safe_load((Path(__file__).parent / "evidence.yaml").read_text())
    return {name: Evidence(**entry) for name, entry in document.items()}


def _risk(names: tuple[str, ...], same_task: bool) -> tuple[str, float | None]:
    """What is known about the accuracy of these methods, and the points that one of them alone has lost.

    `local-sgd` stands for a `local-sgd-16` that is not listed. What was measured is said of the `same_task` alone.
    """
    entries = [evidence().get(name) or evidence().get(name.rpartition("-")[0]) for name in names]
    known = [entry for entry in dict.fromkeys(entries) if entry]
    if not known:
        return "none: the same arithmetic", 0.0
    told = [f"{one.known}; measured: {one.measured}" if same_task and one.measured else one.known for one in known]
    return "; ".join(told), known[0].points_lost if same_task and len(known) == 1 else None


def _together(fitted: Calibration, now: Candidate, software: list[Candidate]) -> Candidate | None:
    """The best candidate for each key of the recipe, combined, without those that decide on a batch or on memory; None
    if it is one only.
    """
    best: dict[str, Candidate] = {}
    for candidate in software:
        if candidate.recipe is not None and not _ALONE & candidate.recipe.keys():
            best.setdefault(next(iter(candidate.recipe)), candidate)
    if len(best) < 2:
        return None
    every = _joined(now, list(best.values()))
    if not {"sync", "compression"} <= best.keys():
        return every
    # The less often ranks average, the less compression brings, and each has a risk: both only if that is faster.
    one = [_joined(now, [one for key, one in best.items() if key != left]) for left in ("sync", "compression")]
    cases = [fitted.case(now.cluster, now.ranks, one.settings) for one in (every, *one)]
    speeds = [made.figures()["images_per_second"] for made in forecasts(fitted, cases, SAMPLES)]
    if speeds[0] >= _BOTH * max(speeds[1:]):
        return every
    return one[int(speeds[2] > speeds[1])] if len(best) > 2 else None


def _joined(now: Candidate, chosen: list[Candidate]) -> Candidate:
    """All of these changes at once."""
    changed = {key: value for one in chosen for key, value in one.changed.items()}
    return replace(
        now,
        what="together: " + "; ".join(one.what for one in chosen),
        settings=Settings.model_validate(now.settings.model_dump() | changed),
        changed=changed,
        recipe={key: value for one in chosen for key, value in (one.recipe or {}).items()},
        evidence=tuple(name for one in chosen for name in one.evidence),
    )


def gains(fitted: Calibration, now: Candidate, change: Candidate, gain: float) -> tuple[float, float]:
    """The least and the largest gain under all combinations of what may be wrong.

    The errors that both steps share are the same before and after: of compute, of communication, and whether more ranks
    than were profiled wait longer. What only the change brings is added to the step after it.
    """
    today, after = (ensemble(fitted, fitted.case(one.cluster, one.ranks, one.settings)) for one in (now, change))
    here, there = today.doubts, after.doubts
    more = max(_added(here.faster, there.faster), _added(here.slower, there.slower))
    # The way between two devices is the change's own, also where both are off the profile's.
    more = max(more, doubt.of_device(after.base.speed / today.base.speed))
    same_links = change.cluster.levels == now.cluster.levels
    more_wire = _added(here.wire_slower, there.wire_slower) if same_links else there.wire_slower
    errors = (1 / here.faster, here.slower), (1 / here.wire_faster, here.wire_slower)
    corners = list(itertools.product(*errors, (False, True), (-1, 1)))
    before_s, after_s = (
        step.periods(
            [
                replace(
                    one.base, slow=(one.slow if waits else one.near) * compute * own**extra, wire=wire * own_wire**extra
                )
                for compute, wire, waits, extra in corners
            ]
        )
        for one, own, own_wire in ((today, 1.0, 1.0), (after, more, more_wire))
    )
    samples = after.base.samples / today.base.samples
    possible = [gain, *(before_s / after_s * samples)]
    if "serial" in after.bounds and "serial" not in today.bounds:
        possible.append(step.period(today.base) / step.period(after.bounds["serial"]) * samples)
    # Of more ranks alone, none is faster than one of fewer.
    alike = (change.cluster, change.settings) == (now.cluster, now.settings)
    return float(min(possible)), float(min(max(gain, samples) if alike else math.inf, max(possible)))


def _added(before: float, after: float) -> float:
    """The factor that comes to an error by the change: errors of different origin add as squares."""
    return 1 + math.sqrt(max(0.0, (after - 1) ** 2 - (before - 1) ** 2))


def _adding(fitted: Calibration, now: Candidate, today: Point, money: Money) -> Adding:
    """Double the ranks, from one to as many as the cluster has room for and an epoch has samples for."""
    room = min(now.cluster.largest or MOST_RANKS, MOST_RANKS, money.most_ranks(today.batch_size))
    counts = sorted({min(2**i, room) for i in range(15)} | {now.ranks})
    made = forecasts(fitted, [fitted.case(now.cluster, count, now.settings) for count in counts], SAMPLES)
    figures = {count: one.figures() for count, one in zip(counts, made, strict=True)}
    points = {count: (one["images_per_second"], one["efficiency"]) for count, one in figures.items()}
    loses = [count for i, count in enumerate(counts) if any(points[less][0] >= points[count][0] for less in counts[:i])]
    doubled = [(a, b) for a, b in itertools.pairwise(counts) if b == 2 * a and b not in loses]
    most = next((a for a, b in doubled if points[b][0] < _GROWS * points[a][0]), None)
    told = [f"{today.unit}/s grow up to {counts[-1]} ranks"] if most is None and not loses else []
    told += [f"{', '.join(map(str, loses))} ranks are slower than fewer"] if loses else []
    told += [] if most is None else [f"beyond {most} ranks, twice as many bring less than 10 % more {today.unit}/s"]
    return Adding(points=points, most=most, loses=loses, told="; ".join(told))
