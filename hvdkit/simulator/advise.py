"""`hvdkit advise`: predicts each change, and ranks the changes by gain, with their costs and risks.

Software comes before hardware, since it is cheaper. A gain has an interval of its own: the errors of compute and
communication are the same before and after the change, so they partly cancel.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from hvdkit.results.json_files import Result
from hvdkit.results.profile import Profile
from hvdkit.simulator import candidates, step
from hvdkit.simulator.calibration import Calibration, calibrate
from hvdkit.simulator.candidates import MOST_RANKS, Candidate, Kind
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.predict import Point, Record, checked, expected_errors, point
from hvdkit.simulator.settings import Settings
from hvdkit.simulator.step import Case

_LEAST_GAIN = 1.005  # a smaller gain is not reported
_GROWS = 1.1  # the gain of twice the ranks, below which they are not worth it
_BOTH = 1.05  # the gain of compression with Local SGD over the better one of them, below which one is enough


class Suggestion(Record):
    """One change. `gain` is images per second relative to today's, expected from `gain_low` to `gain_high`.

    `sure` says that `gain_low` is a gain too. `settings` are for `--set`; `recipe` is what `--apply` writes, None if no
    key of the recipe does it. Costs are of all ranks, at the price per GPU-hour; they and the times of an epoch and of
    the training are None if images, epochs or price are unknown. `saved` is the cost of training that the change
    saves. `risk` is what is known about its accuracy.
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
    saved: float | None
    effort: str
    risk: str
    warnings: list[str]


class Adding(Record):
    """What more ranks bring: `points` has (images per second, efficiency) by the number of ranks.

    Twice as many ranks as `most` bring less than a tenth more; None if they bring more everywhere. `loses` are the
    numbers of ranks that are slower than a smaller number.
    """

    points: dict[int, tuple[float, float]]
    most: int | None
    loses: list[int]
    told: str


class Advice(Record, Result):
    """`advise.json`; `suggestions` are software first, each kind by gain."""

    schema_version: Literal[1] = 1
    model: str
    cluster: str
    price_per_gpu_hour: float | None
    today: Point
    suggestions: list[Suggestion]
    adding: Adding

    def records(self) -> list[dict[str, Any]]:
        """A row for each suggestion."""
        return [each.model_dump(exclude={"settings", "recipe", "warnings"}) for each in self.suggestions]


@dataclass(frozen=True)
class Money:
    """Images per epoch, epochs, and the price of a GPU for an hour; None if unknown."""

    images: int | None
    epochs: int | None
    price: float | None

    def of(self, images_per_second: float, ranks: int, price: float | None) -> tuple[float | None, ...]:
        """Seconds per epoch and of the training, cost of an epoch and of the training."""
        epoch = self.images / images_per_second if self.images else None
        train = epoch * self.epochs if epoch is not None and self.epochs else None
        hour = None if price is None else price * ranks / 3600
        return epoch, train, *(None if t is None or hour is None else t * hour for t in (epoch, train))


def advise(profile: Profile, cluster: Cluster, ranks: int, settings: Settings, money: Money) -> Advice:
    """All suggestions. Raises RequestError if the cluster has no room for the ranks."""
    checked([ranks], cluster)
    found = calibrate(profile)
    today = point(found, cluster, ranks, settings)
    now = Candidate("software", "today", settings, {}, cluster, ranks)
    pairs = [(each, _suggestion(found, now, today, each, money)) for each in candidates.software(found, now)]
    pairs = sorted((pair for pair in pairs if pair[1].gain >= _LEAST_GAIN), key=lambda pair: -pair[1].gain)
    together = _together(found, now, [each for each, _ in pairs])
    software = [_suggestion(found, now, today, together, money)] if together is not None else []
    software += [suggestion for _, suggestion in pairs]
    hardware = [_suggestion(found, now, today, each, money) for each in candidates.hardware(now)]
    both = [*sorted(software, key=lambda e: -e.gain), *sorted(hardware, key=lambda e: -e.gain)]
    return Advice(
        model=profile.model,
        cluster=cluster.name,
        price_per_gpu_hour=money.price,
        today=today,
        suggestions=[each for each in both if each.gain >= _LEAST_GAIN],
        adding=_adding(found, now),
    )


@cache
def evidence() -> dict[str, str]:
    """What is known about the accuracy of each method: what hvdkit has measured, or else what its authors report."""
    found = yaml.safe_load((Path(__file__).parent / "evidence.yaml").read_text())
    return {str(name): str(text) for name, text in found.items()}


def _together(found: Calibration, now: Candidate, software: list[Candidate]) -> Candidate | None:
    """The best candidate for each key of the recipe, combined, except batch sizes; None if there is only one."""
    best: dict[str, Candidate] = {}
    for each in software:
        if each.recipe is not None and "batch_size" not in each.recipe:
            best.setdefault(next(iter(each.recipe)), each)
    if len(best) < 2:
        return None
    every = _joined(now, list(best.values()))
    if not {"sync", "compression"} <= best.keys():
        return every
    # The less often ranks average, the less compression brings, and each has a risk: both only if that is faster.
    one = [_joined(now, [each for key, each in best.items() if key != left]) for left in ("sync", "compression")]
    speeds = [point(found, now.cluster, now.ranks, each.settings).images_per_second for each in (every, *one)]
    if speeds[0] >= _BOTH * max(speeds[1:]):
        return every
    return one[int(speeds[2] > speeds[1])] if len(best) > 2 else None


def _joined(now: Candidate, chosen: list[Candidate]) -> Candidate:
    """All of these changes at once."""
    changed = {key: value for each in chosen for key, value in each.changed.items()}
    return replace(
        now,
        what="together: " + "; ".join(each.what for each in chosen),
        settings=Settings.model_validate(now.settings.model_dump() | changed),
        changed=changed,
        recipe={key: value for each in chosen for key, value in (each.recipe or {}).items()},
        evidence=tuple(name for each in chosen for name in each.evidence),
    )


def _risk(names: tuple[str, ...]) -> str:
    """What is known about the accuracy of these methods; `local-sgd` stands for a `local-sgd-16` that is not listed."""
    known = evidence()
    texts = [known.get(name) or known.get(name.rpartition("-")[0]) for name in names]
    return "; ".join(dict.fromkeys(text for text in texts if text)) or "none: the same arithmetic"


def _suggestion(found: Calibration, now: Candidate, today: Point, change: Candidate, money: Money) -> Suggestion:
    after = point(found, change.cluster, change.ranks, change.settings)
    gain = after.images_per_second / today.images_per_second
    low, high = _gains(found, now, change, gain)
    price = change.cluster.price_per_gpu_hour if change.other_machines else money.price
    epoch, train, epoch_cost, train_cost = money.of(after.images_per_second, change.ranks, price)
    before = money.of(today.images_per_second, now.ranks, money.price)[3]
    return Suggestion(
        kind=change.kind,
        what=change.what,
        settings=change.changed,
        recipe=change.recipe,
        ranks=change.ranks,
        step_ms=after.step_ms,
        images_per_second=after.images_per_second,
        gain=gain,
        gain_low=low,
        gain_high=high,
        sure=low > 1,
        epoch_s=epoch,
        train_s=train,
        epoch_cost=epoch_cost,
        train_cost=train_cost,
        saved=None if before is None or train_cost is None else before - train_cost,
        effort=change.effort,
        risk=_risk(change.evidence),
        warnings=after.warnings,
    )


def _gains(found: Calibration, now: Candidate, change: Candidate, gain: float) -> tuple[float, float]:
    """The least and the largest gain if compute and communication have their expected errors, before and after."""
    cases = [found.case(each.cluster, each.ranks, each.settings) for each in (now, change)]
    (error, wire_error, _), (error_after, wire_error_after, _) = (
        expected_errors(found, each, candidate.settings) for each, candidate in zip(cases, (now, change), strict=True)
    )
    corners = list(itertools.product((-1, 1), repeat=2))

    def periods(base: Case, wire_error: float) -> list[float]:
        factors = [((1 + error) ** compute, (1 + wire_error) ** wire) for compute, wire in corners]
        schedule = step.simulate([replace(base, slow=slow, wire=wire) for slow, wire in factors])
        return [float(period) for period in schedule.period]

    # the additional error of the change is in the step after it alone
    more = max(0.0, error_after - error)
    images = [each.network.ranks * each.batch for each in cases]
    gains = [gain]
    before, after = periods(cases[0], wire_error), periods(cases[1], wire_error_after)
    for slow, quick, (_, wire) in zip(before, after, corners, strict=True):
        gains.append(slow / (quick * (1 + more) ** wire) * images[1] / images[0])
    return min(gains), max(gains)


def _adding(found: Calibration, now: Candidate) -> Adding:
    """Double the ranks, from one to as many as the cluster has room for."""
    room = min(now.cluster.largest or MOST_RANKS, MOST_RANKS)
    counts = sorted({min(2**i, room) for i in range(15)} | {now.ranks})
    points = {}
    for count in counts:
        base = found.case(now.cluster, count, now.settings)
        seconds, alone = step.period(base), step.period(base.alone)
        points[count] = (count * base.batch * found.workload.batch_size / seconds, min(1.0, alone / seconds))
    loses = [count for i, count in enumerate(counts) if any(points[less][0] >= points[count][0] for less in counts[:i])]
    doubled = [(a, b) for a, b in itertools.pairwise(counts) if b == 2 * a and b not in loses]
    most = next((a for a, b in doubled if points[b][0] < _GROWS * points[a][0]), None)
    half = next((count for count in counts if points[count][1] < 0.5), None)
    told = [f"images/s grow up to {counts[-1]} ranks"] if most is None and not loses else []
    if loses:
        told.append(f"{', '.join(map(str, loses))} ranks are slower than fewer")
    if most is not None:
        told.append(f"beyond {most} ranks, twice as many bring less than 10 % more images/s")
    if half is not None:
        told.append(f"from {half} ranks on, efficiency is below 50 %")
    return Adding(points=points, most=most, loses=loses, told="; ".join(told))
