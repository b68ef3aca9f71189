"""`hvdkit advise`: what could be changed, each predicted, ranked by what it brings, with what it costs and risks.

Software comes before hardware, as it is cheaper. A gain has an interval of its own: the same doubts about compute and
communication befall the step before and after the change, so they are followed through both at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict

from hvdkit.results.profile import Profile
from hvdkit.simulator import changes, engine, step
from hvdkit.simulator.basis import Basis, basis
from hvdkit.simulator.changes import MOST_RANKS, Change, Kind
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.costs import Network
from hvdkit.simulator.predict import Point, checked, doubts, point
from hvdkit.simulator.settings import Settings, case
from hvdkit.simulator.step import Case

_WORTH = 1.005  # a gain below is not told
_GROWS = 1.1  # images a second by twice the ranks, for these to be told as growing
_BOTH = 1.05  # compression and Local SGD at once, against the better one of them


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Suggestion(_Record):
    """One change. `gain` is images a second against today's, believed between `gain_low` and `gain_high`; `sure` says
    that even the low one is a gain. `settings` are for `--set`, `recipe` is what `--apply` writes, None where no key of
    a recipe says it. `epoch_s`, `train_s` and costs (of all ranks, at the price per GPU-hour) are None where images,
    epochs or price are not known; `saved` is the cost of training saved by it. `risk` is what is known of accuracy.
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


class Adding(_Record):
    """What more ranks bring: `points` by rank count (images a second, efficiency).

    Beyond `most` ranks twice as many bring less than a tenth, None where they bring more as far as was looked. `loses`
    are the counts that are slower than a smaller one.
    """

    points: dict[int, tuple[float, float]]
    most: int | None
    loses: list[int]
    told: str


class Advice(_Record):
    """`advise.json`; `suggestions` are software first, each kind by gain."""

    schema_version: Literal[1] = 1
    model: str
    cluster: str
    price_per_gpu_hour: float | None
    today: Point
    suggestions: list[Suggestion]
    adding: Adding


@dataclass(frozen=True)
class Money:
    """Images an epoch, epochs, and the price of a GPU for an hour; None where they are not known."""

    images: int | None
    epochs: int | None
    price: float | None

    def of(self, images_per_second: float, ranks: int, price: float | None) -> tuple[float | None, ...]:
        """(seconds an epoch, seconds of training, cost of an epoch, cost of training)."""
        epoch = self.images / images_per_second if self.images else None
        train = epoch * self.epochs if epoch is not None and self.epochs else None
        hour = None if price is None else price * ranks / 3600
        return epoch, train, *(None if t is None or hour is None else t * hour for t in (epoch, train))


def advise(profile: Profile, cluster: Cluster, ranks: int, settings: Settings, money: Money) -> Advice:
    """All suggestions. Raises RequestError where so many ranks do not fit the cluster."""
    checked([ranks], cluster)
    found = basis(profile)
    today = point(found, cluster, ranks, settings)
    now = Change("software", "today", settings, {}, cluster, ranks)
    software = [_suggestion(found, now, today, change, money) for change in changes.software(found, now)]
    software = sorted(software, key=lambda each: -each.gain)
    together = _together(found, now, software)
    if together is not None:
        software.insert(0, _suggestion(found, now, today, together, money))
    hardware = [_suggestion(found, now, today, change, money) for change in changes.hardware(now)]
    both = [*sorted(software, key=lambda e: -e.gain), *sorted(hardware, key=lambda e: -e.gain)]
    return Advice(
        model=profile.model,
        cluster=cluster.name,
        price_per_gpu_hour=money.price,
        today=today,
        suggestions=[each for each in both if each.gain >= _WORTH],
        adding=_adding(found, now),
    )


@cache
def evidence() -> dict[str, str]:
    """What is known of each method's accuracy, by name: what hvdkit has measured, else what its authors say."""
    found = yaml.safe_load((Path(__file__).parent / "evidence.yaml").read_text())
    return {str(name): str(text) for name, text in found.items()}


def _together(found: Basis, now: Change, software: list[Suggestion]) -> Change | None:
    """The best of each kind that a recipe can say, in one; None where there is but one. Batches stay as they are."""
    chosen: dict[str, Suggestion] = {}
    for each in software:
        if each.recipe is None or "batch_size" in each.recipe or each.gain < _WORTH:
            continue
        chosen.setdefault(next(iter(each.recipe)), each)
    if len(chosen) < 2:
        return None
    every = _joined(now, list(chosen.values()))
    if not {"sync", "compression"} <= chosen.keys():
        return every
    # The more seldom ranks meet, the less compression brings, and either has a risk: both only where that is faster.
    one = [_joined(now, [each for key, each in chosen.items() if key != left]) for left in ("sync", "compression")]
    speeds = [point(found, now.cluster, now.ranks, each.settings).images_per_second for each in (every, *one)]
    if speeds[0] >= _BOTH * max(speeds[1:]):
        return every
    return one[int(speeds[2] > speeds[1])] if len(chosen) > 2 else None


def _joined(now: Change, chosen: list[Suggestion]) -> Change:
    """All of them in one."""
    told: dict[str, Any] = {}
    recipe: dict[str, Any] = {}
    for each in chosen:
        told |= each.settings
        recipe |= each.recipe or {}
    return replace(
        now,
        what="together: " + "; ".join(each.what for each in chosen),
        settings=Settings.model_validate(now.settings.model_dump() | told),
        told=told,
        recipe=recipe,
        evidence=tuple(name for each in chosen for name in _names(each)),
    )


def _names(suggestion: Suggestion) -> list[str]:
    recipe = suggestion.recipe or {}
    compression, sync = recipe.get("compression"), recipe.get("sync")
    return ([compression["method"]] if compression else []) + ([f"local-sgd-{sync['every']}"] if sync else [])


def _risk(names: tuple[str, ...]) -> str:
    """What is known of the accuracy of all these; of a method with a number that is not listed, that of the method."""
    known = evidence()
    texts = [known.get(name) or known.get(name.rpartition("-")[0]) for name in names]
    return "; ".join(dict.fromkeys(text for text in texts if text)) or "none: the same arithmetic"


def _suggestion(found: Basis, now: Change, today: Point, change: Change, money: Money) -> Suggestion:
    after = point(found, change.cluster, change.ranks, change.settings)
    gain = after.images_per_second / today.images_per_second
    low, high = _gains(found, now, change, gain)
    price = change.cluster.price_per_gpu_hour if change.elsewhere else money.price
    epoch, train, epoch_cost, train_cost = money.of(after.images_per_second, change.ranks, price)
    before = money.of(today.images_per_second, now.ranks, money.price)[3]
    return Suggestion(
        kind=change.kind,
        what=change.what,
        settings=change.told,
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


def _gains(found: Basis, now: Change, change: Change, gain: float) -> tuple[float, float]:
    """The gain where compute, and where communication, are as far off as is believed, before and after alike."""
    cases = [
        case(found.workload, Network(each.cluster, each.ranks), each.settings, found.known) for each in (now, change)
    ]
    (off, wire_off), (off_after, wire_after) = (
        doubts(found, each, made.settings) for each, made in zip(cases, (now, change), strict=True)
    )
    corners = list(itertools.product((-1, 1), repeat=2))
    before = _periods(cases[0], [((1 + off) ** compute, (1 + wire_off) ** wire) for compute, wire in corners])
    after = _periods(cases[1], [((1 + off) ** compute, (1 + wire_after) ** wire) for compute, wire in corners])
    # what the change itself makes more doubtful befalls it alone
    more = max(0.0, off_after - off)
    images = [each.network.ranks * each.batch for each in cases]
    gains = [gain]
    for slow, quick, (_, wire) in zip(before, after, corners, strict=True):
        gains.append(slow / (quick * (1 + more) ** wire) * images[1] / images[0])
    return min(gains), max(gains)


def _periods(base: Case, factors: Sequence[tuple[float, float]]) -> list[float]:
    """Step times with compute and communication multiplied."""
    schedule = step.simulate([replace(base, slow=slow, wire=wire) for slow, wire in factors])
    return [float(period) for period in schedule.period]


def _adding(found: Basis, now: Change) -> Adding:
    """Ranks doubled from one on, as far as the cluster goes."""
    room = min(now.cluster.largest or MOST_RANKS, MOST_RANKS)
    counts = sorted({min(2**i, room) for i in range(15)} | {now.ranks})
    points = {}
    for count in counts:
        made = case(found.workload, Network(now.cluster, count), now.settings, found.known)
        seconds = float(engine.run(step.detailed(made)).period)
        alone = float(engine.run(step.detailed(made.alone)).period)
        points[count] = (count * made.batch * found.workload.batch_size / seconds, min(1.0, alone / seconds))
    loses = [count for i, count in enumerate(counts) if any(points[less][0] >= points[count][0] for less in counts[:i])]
    doubled = [(a, b) for a, b in itertools.pairwise(counts) if b == 2 * a and b not in loses]
    most = next((a for a, b in doubled if points[b][0] < _GROWS * points[a][0]), None)
    half = next((count for count in counts if points[count][1] < 0.5), None)
    told = [f"images/s grow up to {counts[-1]} ranks"] if most is None and not loses else []
    if loses:
        told.append(f"{', '.join(map(str, loses))} ranks are slower than fewer")
    if most is not None:
        told.append(f"beyond {most} ranks twice as many bring less than a tenth more")
    if half is not None:
        told.append(f"from {half} ranks on more than half of what is paid for waits")
    return Adding(points=points, most=most, loses=loses, told="; ".join(told))
