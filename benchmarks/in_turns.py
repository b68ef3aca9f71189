"""Ranks that take turns: one job trains each side for a few steps at a time, so that all sides see the same machine."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from hvdkit.launch.namespaces import Network

# Of ranks that take turns: overrides of the recipe, and how many steps of a turn are left out and measured.
Side = tuple[list[str], int, int]


def take_turns(
    network: Network | None,
    slots: int,
    framework: str,
    keys: Sequence[str],
    sides: Mapping[str, Side],
    order: Sequence[str],
    rounds: int,
    folder: Path,
    recipe: str = "resnet20-digits",
) -> dict[str, Any]:
    """What `turns_rank.py` writes, of `slots` ranks on each host of a network, or on this machine; the sides of `order`
    are shuffled.

    By the recipe with `keys` the ranks' environment is made. Raises as `run` does, or what a launcher raises.
    """
    found, shuffle = folder / "found.json", random.Random(f"{framework} {network and network.mbit_per_s}")
    orders = [shuffle.sample(order, len(order)) for _ in range(rounds)]
    arguments = [framework, json.dumps({"sides": sides, "rounds": orders, "out": str(found)})]
    job = {"out": str(folder), "script": "turns_rank.py", "recipe": recipe, "framework": framework, "keys": list(keys)}
    if network is None:
        harness.start_ranks(ranks=slots, arguments=arguments, **job)
    else:
        where = {"ranks": slots * len(network.names), "hosts": network.hosts_option(slots)}
        harness.elsewhere(harness.start_ranks, start=network.run, arguments=arguments, **job, **where)
    return dict(json.loads(found.read_text()))


def turn_ms(rounds: list[list[tuple[str, list[list[float]]]]]) -> list[dict[str, float]]:
    """Milliseconds a step of each side by round, from the turns: means over a turn's steps, of its slowest rank."""
    found = []
    for turns in rounds:
        taken: dict[str, list[float]] = {}
        for side, ranks in turns:
            taken.setdefault(side, []).append(max(map(statistics.fmean, ranks)))
        found.append({side: 1e3 * statistics.fmean(each) for side, each in taken.items()})
    return found
