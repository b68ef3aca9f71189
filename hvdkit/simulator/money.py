"""What training costs: time and money of an epoch and of the whole, at a price per GPU-hour; budgets and deadlines."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from hvdkit.errors import RequestError
from hvdkit.simulator.cluster import Cluster

RESTART_S = 300.0  # assumed: to get another machine, start ranks and read the checkpoint


class Bill(NamedTuple):
    """Seconds and cost of an epoch and of the training, and cost per million units; None where unknown."""

    epoch_s: float | None
    train_s: float | None
    epoch_cost: float | None
    train_cost: float | None
    cost_per_million_images: float | None


@dataclass(frozen=True)
class Money:
    """Samples per epoch, epochs, and the price of a GPU for an hour in `currency`; None if unknown.

    `source` says whose price it is. `budget` is in the same currency, `deadline_s` in seconds from the start.
    `interruptions` is how often a host is taken away in an hour; training continues from the last epoch's
    checkpoint. Costs and faults count the `unit`, such as tokens, of which a sample has `units_per_sample`.
    """

    samples: int | None = None
    epochs: int | None = None
    price: float | None = None
    currency: str = "USD"
    source: str = ""
    budget: float | None = None
    deadline_s: float | None = None
    interruptions: float = 0.0
    ranks_per_host: int = 1
    unit: str = "images"
    units_per_sample: int = 1

    @property
    def limited(self) -> bool:
        """Whether there is a budget or a deadline."""
        return self.budget is not None or self.deadline_s is not None

    @property
    def told(self) -> str:
        """What a device costs, or that it is unknown."""
        if self.price is None:
            return "price: unknown; give --price or the cluster file's price_per_gpu_hour for costs"
        return f"price: {amount(self.price, self.currency)} per GPU-hour ({self.source or 'source and date not given'})"

    def at(self, cluster: Cluster) -> Money:
        """The same training at the price of another cluster."""
        return replace(
            self, price=cluster.price_per_gpu_hour, currency=cluster.currency, source=cluster.price_source,
            ranks_per_host=cluster.ranks_per_host,
        )  # fmt: skip

    def of(self, step_ms: float, batch_size: int, ranks: int) -> Bill:
        """The bill of a step of `batch_size` samples a rank.

        As in training, an incomplete last batch is left out. Hosts are paid for as a whole.
        """
        hour = None if self.price is None else self.price * self._hosts(ranks) * self.ranks_per_host / 3600
        per_million = (
            None if hour is None else 1e6 * hour * 1e-3 * step_ms / (batch_size * ranks * self.units_per_sample)
        )
        if self.samples is None:
            return Bill(None, None, None, None, per_million)
        epoch = 1e-3 * step_ms * (self.samples // (batch_size * ranks))
        lost = self._lost(epoch, ranks)
        if lost >= 1:
            return Bill(None, None, None, None, None)
        epoch /= 1 - lost
        train = epoch * self.epochs if self.epochs else None
        cost, total = (None if hour is None or seconds is None else seconds * hour for seconds in (epoch, train))
        return Bill(epoch, train, cost, total, per_million and per_million / (1 - lost))

    def fits(self, batch_size: int, ranks: int) -> bool:
        """Whether an epoch has samples for a step."""
        return self.samples is None or batch_size * ranks <= self.samples

    def most_ranks(self, batch_size: int) -> int:
        """The most ranks for which that is so."""
        return 2**62 if self.samples is None else max(1, self.samples // batch_size)

    def check(self, step_ms: float, batch_size: int, ranks: int) -> None:
        """Raise RequestError if an epoch has too few samples, or something is missing for a budget or a deadline."""
        if self.samples is not None and not self.fits(batch_size, ranks):
            most = self.samples // ranks
            less = f"--set batch_size={most} or less, or fewer ranks" if most else f"-n {self.samples} or less"
            raise RequestError(
                f"batch_size: expected at most {self.samples} {self._kind}, an epoch, over {ranks} ranks, "
                f"got {batch_size} × {ranks} = {batch_size * ranks}, which `hvdkit train` refuses too; give {less}"
            )
        limits = {"--budget": self.budget, "--deadline": self.deadline_s, "--spot-interruption": self.interruptions}
        limit = next((name for name, value in limits.items() if value), None)
        given = {"--epoch-tokens" if self.unit == "tokens" else "--epoch-images": self.samples, "--epochs": self.epochs}
        missing = [name for name, value in given.items() if value is None]
        if limit and missing:
            raise RequestError(f"{limit}: expected {' and '.join(missing)} too; the profile's recipe does not say it")
        if self.samples is not None and self.of(step_ms, batch_size, ranks).epoch_s is None:
            raise RequestError(
                f"--spot-interruption {self.interruptions:g}: hosts are taken away faster than an epoch ends, so that "
                "training never ends; take fewer hosts, or shorter epochs"
            )

    @property
    def _kind(self) -> str:
        return self.unit if self.units_per_sample == 1 else f"samples of {self.units_per_sample} {self.unit}"

    def _hosts(self, ranks: int) -> int:
        return -(-ranks // self.ranks_per_host)

    def _lost(self, epoch_s: float, ranks: int) -> float:
        """The share of time that interruptions take: each costs a restart, and half an epoch on average.

        1 or more means that training never ends.
        """
        return self.interruptions * self._hosts(ranks) / 3600 * (RESTART_S + epoch_s / 2)


def amount(value: float, currency: str | None) -> str:
    """Money with the digits that matter: at least three, and no cents from 1,000 on."""
    digits = 0 if abs(value) >= 1000 else 2 if abs(value) >= 1 or value == 0 else 2 - math.floor(math.log10(abs(value)))
    return f"{value:,.{digits}f} {currency or ''}".rstrip()
