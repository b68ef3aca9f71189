"""benchmarks/network.py: the arithmetic of rates and limits, what is kept of a broken run, and one real step or two."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import harness, network, starved, written
from hvdkit import paths
from hvdkit.core.group import Mesh, Topology
from hvdkit.recipe import schema
from hvdkit.recipe.communication import Sync
from hvdkit.worker import measurement
from tests.cluster import starving
from tests.conftest import ROOT

COMPUTE_MS, COST = 300.0, 14_000.0  # of an invented machine: a dense step takes 300 + 14000/r ms


def test_no_rate_where_communication_costs_nothing() -> None:
    assert starved.share_of(COMPUTE_MS, COMPUTE_MS + COST / starved.rate_for(0.7, COMPUTE_MS, COST)) == (
        pytest.approx(0.7)
    )
    with pytest.raises(ValueError, match="no longer than computing"):
        starved.rate_for(0.7, COMPUTE_MS, 0.0)
    for share in (0.0, 1.0, 1.5):
        with pytest.raises(ValueError, match="share"):
            starved.rate_for(share, COMPUTE_MS, COST)


def test_a_row_is_of_ratios_within_rounds() -> None:
    # The second round is on a machine half as fast: ratios are the same, times are not.
    first = {"compute": 300.0, "dense": 1000.0, "local8": 312.5}
    rounds = [first, {name: 2 * ms for name, ms in first.items()}]
    row = starved.row(rounds, "local8", 40, [0.98, 0.99, 0.97], [0.985, 0.975, 0.98])
    limit = starved.limit_of(row["share"])
    assert row["share"] == pytest.approx(0.7) and limit == pytest.approx(10 / 3)
    assert row["share_of_limit"] == pytest.approx(0.96) and row["speedup"] == pytest.approx(3.2)
    assert row["share_of_limit"] * limit == pytest.approx(row["speedup"])
    assert (row["step_ms"], row["step_ms_low"], row["step_ms_high"]) == (468.75, 312.5, 625.0)
    assert row["epoch_s"] == pytest.approx(40 * 0.46875)
    assert (row["accuracy_mean"], row["accuracy_low"], row["accuracy_high"]) == (pytest.approx(0.98), 0.97, 0.99)
    assert row["as_accurate"] is True and row["seeds"] == 3 and row["rounds"] == 2
    untrained = starved.row(rounds, "local8", 40, [], [0.98])
    assert untrained["accuracy_mean"] is None and untrained["as_accurate"] is None
    where = {"framework": "pytorch", "asked_share": 0.7}
    assert starved.missed([untrained | where], "pytorch") == ["70%: nothing was trained"]


def _rows(local_ms: float, accuracy: float) -> list[dict[str, Any]]:
    rounds = [{"compute": 300.0, "dense": 1000.0, "local8": local_ms}]
    where = {"framework": "pytorch", "asked_share": 0.7, "rate_mbit_per_s": 20.0}
    return [
        where | {"method": method, "bytes_per_step": sent} | starved.row(rounds, method, 40, [reached], [0.98])
        for method, sent, reached in (("dense", 1.6e6, 0.98), ("local8", 2e5, accuracy))
    ]


@pytest.mark.parametrize(
    ("local_ms", "accuracy", "told"),
    [
        (310.0, 0.98, []),
        (320.0, 0.98, ["70%: local8 reaches 0.938 of the limit, 3.12 times; the target is 0.95, 3.17 times"]),
        (310.0, 0.90, ["70%: dense reaches 0.300 of the limit, 1.00 times; the target is 0.95, 3.17 times"]),
    ],
)
def test_a_target_counts_for_what_is_as_accurate(local_ms: float, accuracy: float, told: list[str]) -> None:
    assert starved.missed(_rows(local_ms, accuracy), "pytorch") == told


def test_page_and_picture_tell_each_row(tmp_path: Path) -> None:
    rows = _rows(310.0, 0.98)
    story = json.loads((ROOT / "benchmarks" / "bench-network.json").read_text()) | {"rows": rows}
    assert rows[0].keys() == story["rows"][0].keys()
    text = written.page("bench-network", story)
    assert (
        "| local8 | 310 (310–310) | 12.4 | 3.23 | 0.968 (0.968–0.968) | 200,000 | 0.9800 (0.9800–0.9800) | yes |"
        in text
    )
    assert "limit is 3.33" in text
    network.picture(rows, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"


def test_methods_are_recipes_and_their_windows_whole_rounds_of_one_epoch() -> None:
    left = network.IMAGES - network.STEPS_PER_EPOCH * network.RANKS * network.BATCH
    assert 0 <= left < network.RANKS * network.BATCH, "an epoch leaves out what makes no whole step"
    for method in network.METHODS.values():
        recipe = schema.load(paths.recipes() / "resnet20-digits.yaml", [*network.KEYS, *method.keys])
        assert recipe.sync is None if method.every == 1 else recipe.sync and recipe.sync.every == method.every
        assert method.warmup > 0 and method.warmup % method.every == 0 and method.measured % method.every == 0
        assert method.warmup + method.measured <= network.STEPS_PER_EPOCH
    assert network.OTHERS_METHOD in network.METHODS


def test_a_step_of_local_sgd_is_timed_by_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are slow in turn wait for each other at each synchronous step, and then only where they meet."""
    slow_in_turn = [[0.1, 0.3, 0.1, 0.3], [0.3, 0.1, 0.3, 0.1]]
    used = {"own_s": 0.9, "busy_s": 2.0, "capacity_s": 4.0}

    def gathered(sync: Sync | None) -> measurement.Measurement:
        clock = SimpleNamespace(seconds=slow_in_turn[0], cpu_seconds=[0.1] * 4, first_at=None)

        def everyone(mine: dict[str, Any], world: Any, name: str) -> list[dict[str, Any]]:
            return [mine, mine | {"seconds": slow_in_turn[1]}]

        adapter, recipe = SimpleNamespace(allgather_object=everyone), SimpleNamespace(warmup_steps=0, sync=sync)
        # Two hosts of one machine: one kernel, whose CPU time both see.
        return measurement.gather(adapter, recipe, Mesh(Topology(size=2)), clock, used, [100] * 4)

    assert gathered(None).samples_per_second == pytest.approx(400 / 1.2)
    local = gathered(Sync(every=4))
    assert local.samples_per_second == pytest.approx(400 / 0.8)
    assert local.figures["load"] == pytest.approx((2.0 - 2 * 0.9) / 4.0)


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_a_starved_run_of_local_sgd(tmp_path: Path) -> None:
    method = network.Method("each 2 updates", ("sync={every: 2}",), every=2, measured=2)
    with starving.network(network.RANKS, 100.0) as slow:
        result = network.timed(slow, 50.0, "pytorch", method, tmp_path / "run")
    assert result["steps"] == 6 and result["measured_steps"] == 2
    ring = 1.5 * 4 * network.PARAMETERS
    assert result["bytes_per_step"] == pytest.approx(ring / 2)
    # Two steps hold one meeting, which cannot be quicker than the links.
    assert 2 * harness.step_ms(result) > 1e3 * ring * 8 / 50e6
