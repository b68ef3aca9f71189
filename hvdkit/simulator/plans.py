"""`hvdkit advise --budget --deadline`: the cheapest way to train in time, and the fastest one for the money.

A way is a number of ranks on the cluster, or on another one that hvdkit ships if the speed of both devices is known.
The recipe stays as it is; with more ranks the global batch grows. Ways with fewer than 100 updates an epoch are left
out, unless today has as few: the accuracy that they reach is not known (Goyal et al. 2017 trained ImageNet with 156).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import NormalDist

from pydantic import Field

from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.candidates import MOST_RANKS, Candidate, other_machines
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.doubt import guesses
from hvdkit.simulator.forecast import forecasts
from hvdkit.simulator.money import Bill, Money
from hvdkit.simulator.predict import ResultPart
from hvdkit.simulator.refusals import refusal
from hvdkit.simulator.settings import Settings

_LEAST_UPDATES = 100  # in an epoch


class TrainingPlan(ResultPart):
    """Time and cost of the training, expected and at the slow end of the interval. `cost` is None without a price.

    `sure` says that the slow end is within budget and deadline too, and that nothing is a guess. `probability` is that
    of the limits being kept: times are log-normal on both sides of the expected one, 90 % of them in the interval.
    `excess` is the expected time or cost relative to its limit, whichever is larger.
    """

    cluster: str
    device: str
    ranks: int
    global_batch: int
    images_per_second: float
    train_s: float
    train_high_s: float
    cost: float | None
    cost_high: float | None
    currency: str
    probability: float
    sure: bool
    excess: float = Field(0.0, exclude=True)


class Plans(ResultPart):
    """The cheapest and the fastest way within `budget` (in `currency`) and `deadline_s`; None if there is none.

    `tried` is the number of ways, `nearest` the way that exceeds the limits least, if none is within.
    """

    budget: float | None
    deadline_s: float | None
    currency: str
    tried: int
    cheapest: TrainingPlan | None
    fastest: TrainingPlan | None
    nearest: TrainingPlan | None


def search(fitted: Calibration, now: Candidate, money: Money) -> Plans:
    """Try all ways. Ways that cannot be compared, for want of a price in the same currency, are left out."""
    batch = now.settings.batch_size or fitted.workload.batch_size
    largest = max(now.ranks * batch, (money.samples or 0) // _LEAST_UPDATES)
    ways = [way for machine in _machines(now, money) for way in _ways(fitted, *machine, largest // batch)]
    within = [way for way in ways if way.excess <= 1]
    # A way whose slow end is within the limits too comes before one that may miss them.
    safe = [way for way in within if way.sure] or within
    return Plans(
        budget=money.budget,
        deadline_s=money.deadline_s,
        currency=money.currency,
        tried=len(ways),
        cheapest=min(safe, key=_cost, default=None),
        fastest=min(safe, key=lambda way: way.train_s, default=None),
        nearest=None if within else min(ways, key=lambda way: way.excess, default=None),
    )


def _machines(now: Candidate, money: Money) -> list[tuple[Cluster, Settings, Money]]:
    """The cluster, and those that hvdkit ships with a price in the same currency and a device of known speed."""
    machines = [(now.cluster, now.settings, money)]
    for other, scaled in other_machines(now) if money.price is not None else ():
        bill = money.at(other)
        if other.name != now.cluster.name and bill.price and bill.currency == money.currency:
            machines.append((other, scaled, bill))
    return machines


def _ways(fitted: Calibration, cluster: Cluster, settings: Settings, money: Money, most: int) -> Iterator[TrainingPlan]:
    """1, 2, 3, 4, 6, 8, 12, … hosts, with at most so many ranks."""
    hosts = sorted({1, *(factor * 2**i for i in range(15) for factor in (2, 3))})
    counts = [cluster.ranks_per_host * count for count in hosts]
    most = min(most, cluster.largest or MOST_RANKS, MOST_RANKS)
    bases = [fitted.case(cluster, count, settings) for count in counts if count <= most]
    certain = not guesses(fitted, cluster, settings.speed)
    for one in forecasts(fitted, [base for base in bases if not refusal(base, settings)]):
        figures = one.figures()
        ranks, batch_size = figures["ranks"], figures["batch_size"]
        bill, slow = (money.of(figures[key], batch_size, ranks) for key in ("step_ms", "high_ms"))
        if bill.train_s is None or slow.train_s is None:
            continue
        excess = _excess(bill, money)
        end = one.high if excess < 1 else one.low
        yield TrainingPlan(
            cluster=cluster.name,
            device=cluster.device.name,
            ranks=ranks,
            global_batch=ranks * batch_size,
            images_per_second=figures["images_per_second"],
            train_s=bill.train_s,
            train_high_s=slow.train_s,
            cost=bill.train_cost,
            cost_high=slow.train_cost,
            currency=money.currency,
            probability=probability(excess, abs(math.log(end / one.seconds))),
            sure=certain and _excess(slow, money) <= 1,
            excess=excess,
        )


def _excess(bill: Bill, money: Money) -> float:
    """The larger of time ÷ deadline and cost ÷ budget; an unknown cost exceeds every budget."""
    late = (bill.train_s or 0.0) / money.deadline_s if money.deadline_s else 0.0
    dear = 0.0 if money.budget is None else float("inf") if bill.train_cost is None else bill.train_cost / money.budget
    return max(late, dear)


def probability(excess: float, width: float) -> float:
    """That limits are kept which the expected way exceeds by a factor (below 1: keeps).

    `width` is the logarithm of the ratio from the expected time to the end of its interval on the limit's side.
    """
    if excess in (0.0, float("inf")):
        return 1.0 - min(1.0, excess)
    deviations = NormalDist().inv_cdf(0.95) * -math.log(excess)
    if width == 0:
        return float(excess <= 1)
    return NormalDist().cdf(deviations / width)


def _cost(way: TrainingPlan) -> float:
    """Its cost, or where there is no price its GPU-hours."""
    return way.ranks * way.train_s if way.cost is None else way.cost
