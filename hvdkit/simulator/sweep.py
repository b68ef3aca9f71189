"""`hvdkit predict --sweep`: a grid of what-ifs, all simulated at once.

Each is predicted as `predict.point` does, with fewer samples of the slowest rank.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, Literal

from hvdkit.errors import RequestError
from hvdkit.recipe.grid import MOST, Grid
from hvdkit.results.json_files import Result
from hvdkit.results.profile import Profile
from hvdkit.simulator import predict as predicting
from hvdkit.simulator import settings as settings_
from hvdkit.simulator.calibration import calibrate
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.simulator.forecast import forecasts
from hvdkit.simulator.money import Money
from hvdkit.simulator.predict import ResultPart
from hvdkit.simulator.refusals import refusal
from hvdkit.simulator.settings import Settings
from hvdkit.simulator.step import Case

RANKS = "n"  # the key that stands for the number of ranks


@dataclass(frozen=True)
class WhatIf:
    """One place of the grid: the values of its keys, and what is predicted: the cluster has the settings' links."""

    what: dict[str, Any]
    ranks: int
    settings: Settings
    cluster: Cluster


class Row(ResultPart):
    """One what-if: the swept keys with their values, and the prediction as in a `predict.Point`.

    `images_per_second` and `cost_per_million_images` count the sweep's `unit`. The cost is of whole hosts in the
    cluster's currency, None if its price is unknown.
    """

    what: dict[str, Any]
    ranks: int
    batch_size: int
    step_ms: float
    low_ms: float
    high_ms: float
    images_per_second: float
    efficiency: float
    cost_per_million_images: float | None


class Sweep(ResultPart, Result, file="sweep.json"):
    """`sweep.json`. `rows` are in the order in which keys and values were given, the last key varying fastest.

    `notes` are the warnings, each with the number of rows that it is about. `left_out` are the reasons for which
    what-ifs have no row, as no machine could run them, each with their number.
    """

    schema_version: Literal[1] = 1
    model: str
    profile: str
    cluster: str
    currency: str
    rows: list[Row]
    notes: dict[str, int]
    left_out: dict[str, int]
    unit: str = "images"

    def records(self) -> list[dict[str, Any]]:
        """A row for each what-if, with a column for each swept key."""
        return [row.what | row.model_dump(exclude={"what"}) for row in self.rows]


def checked(
    given: Grid, ranks: Sequence[int], settings: Sequence[str], policy: str | None, cluster: Cluster
) -> list[WhatIf]:
    """Each what-if of a grid, with the numbers of ranks in `ranks` if it has none; `settings` hold for all.

    Raises RequestError for a key or a value that `--set` does not take, or a number of ranks without room.
    """
    if (RANKS in given) == bool(ranks):
        raise RequestError(f"-n: expected {'either ' if ranks else ''}-n or --sweep {RANKS}=8,16")
    if policy is not None and "policy" in given:
        raise RequestError("--sweep policy: leave out --policy")
    grid = {**given, **({RANKS: list(ranks)} if ranks else {})}
    for key, values in grid.items():
        if not values:
            raise RequestError(f"--sweep {key}: expected at least one value")
        if key == RANKS and (wrong := [value for value in values if type(value) is not int]):
            raise RequestError(f"--sweep {RANKS}: expected whole numbers, got {wrong[0]!r}")
    count = math.prod(map(len, grid.values()))
    if count > MOST:
        raise RequestError(f"--sweep: expected at most {MOST:,} what-ifs, got {count:,}; give fewer values")
    predicting.checked(grid[RANKS], cluster)
    same = settings_.parsed(settings, "--set") | ({} if policy is None else {"policy": policy})
    axes = [[(value, _document(key, value)) for value in values] for key, values in grid.items()]
    whatifs = []
    for chosen in itertools.product(*axes):
        what = dict(zip(grid, (value for value, _ in chosen), strict=True))
        document = reduce(_merged, (change for _, change in chosen), same)
        changed = settings_.validated(document, "--sweep")
        whatifs.append(WhatIf(what, what[RANKS], changed, settings_.applied(cluster, changed)))
    return whatifs


def sweep(profile: Profile, cluster: Cluster, whatifs: Sequence[WhatIf]) -> Sweep:
    """Predict what `checked` has returned for a cluster.

    What no machine could run is left out. Raises RequestError if nothing else remains.
    """
    fitted, left_out = calibrate(profile), Counter[str]()
    networks: dict[tuple[str, int], ClusterLinks] = {}
    wanted: list[tuple[WhatIf, Case]] = []
    for whatif in whatifs:
        links = whatif.settings.model_dump_json(include={"link", "hosts"}), whatif.ranks
        network = networks.setdefault(links, ClusterLinks(whatif.cluster, whatif.ranks, whatif.settings.hosts))
        base = replace(fitted.case(network.cluster, whatif.ranks, whatif.settings), network=network)
        if fault := refusal(base, whatif.settings):
            left_out[fault] += 1
        else:
            wanted.append((whatif, base))
    if left_out and not wanted:
        raise RequestError("\n".join(left_out))
    units = fitted.workload.units_per_sample
    money = Money(price=cluster.price_per_gpu_hour, ranks_per_host=cluster.ranks_per_host, units_per_sample=units)
    rows, forecast = [], forecasts(fitted, [base for _, base in wanted])
    for (whatif, _), one in zip(wanted, forecast, strict=True):
        figures = one.figures()
        bill = money.of(figures["step_ms"], figures["batch_size"], whatif.ranks)
        rows.append(Row(what=whatif.what, **figures, cost_per_million_images=bill.cost_per_million_images))
    return Sweep(
        model=profile.model,
        profile=predicting.source(profile),
        cluster=cluster.name,
        currency=cluster.currency,
        rows=rows,
        notes=dict(Counter(warning for one in forecast for warning in one.drawn.doubts.warnings)),
        left_out=dict(left_out),
        unit=fitted.workload.unit,
    )


def _document(key: str, value: Any) -> dict[str, Any]:
    """What `--set key=value` says; nothing for the number of ranks."""
    return {} if key == RANKS else reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value)


def _merged(document: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Both, with what `more` says where they differ."""
    merged = dict(document)
    for key, value in more.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
