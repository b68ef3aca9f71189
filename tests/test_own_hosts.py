"""Steps over bandwidth-limited links for `make validate`: how they are measured, and what rows are made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import anchored, own_hosts, own_hosts_rows, written
from benchmarks.anchored import Row
from tests import simulating
from tests.cluster import starving

pytestmark = pytest.mark.long

FREE, RING_MS, GATHER_MS = 260.0, 150.0, 12.0


def measured(name: str, ms: float) -> dict[str, Any]:
    """A collective over four hosts that takes as long for any bytes."""
    pieces = [{"from_bytes": 0, "latency_us": 1e3 * ms, "mbit_per_s": 1e12}]
    return {
        "operation": name, "ranks": 4, "pieces": pieces,
        "residual_percent": 1.0, "smallest_bytes": 4, "largest_bytes": 10**7,
    }  # fmt: skip


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[float]]:
    """Files as the benchmark leaves them, of a machine that does what the model says; its steps by method."""
    cluster = simulating.cluster(
        name="measured-4-ranks", measured=[measured("allreduce", RING_MS), measured("allgather", GATHER_MS)]
    )
    dense = simulating.profile().model_dump(mode="json")
    spread = dict.fromkeys(("mean", "median", "low", "high"), 5.0)
    compute = dense["step"]["compute_ms"] | {"mean": dense["step"]["compute_ms"]["mean"] + 5.0}
    split = dense["step"] | {"compression_ms": spread, "compute_ms": compute}
    topk = {"settings": {"compression": {"method": "topk", "ratio": 0.01}}, "compression": "topk", "step": split}
    local = {"settings": {"sync": {"every": 4}}, "compression": "none", "step": dense["step"]}
    slower = FREE / 65.0
    steps = {
        "dense": [FREE + RING_MS] * 2,
        "topk": [FREE + 5.0 * slower + GATHER_MS] * 2,
        "local4": [FREE + RING_MS / 4] * 2,
        "compute": [FREE] * 2,
    }
    where = {"framework": "pytorch", "mbit_per_s": 50.0}
    points = {"allreduce": [[1000, 1e3 * RING_MS]], "allgather": [[1000, 1e3 * GATHER_MS]]}
    found = {
        "methods": {name: {} for name in steps},
        "turns": [where | {"load": 0.0, "step_ms": steps}],
        "links": [where | {"cluster": cluster.model_dump(mode="json"), "points": points}],
    }
    profiles = {"pytorch": {"dense": dense, "changes": {"topk": topk, "local4": local}}}
    written.compressed(tmp_path / "own-hosts.json.gz", found)
    written.compressed(tmp_path / "own-hosts-profiles.json.gz", profiles)
    monkeypatch.setattr(own_hosts_rows, "HERE", tmp_path)
    for kept in (own_hosts_rows.measured, own_hosts_rows.profile):
        kept.cache_clear()
    yield steps
    for kept in (own_hosts_rows.measured, own_hosts_rows.profile):
        kept.cache_clear()


def rows(name: str) -> dict[str, Row]:
    return {row.row.split(", ")[-1]: row for row in own_hosts_rows.rows() if row.set == name}


def test_a_machine_that_does_what_the_model_says_is_predicted(table: dict[str, list[float]]) -> None:
    found = rows(own_hosts_rows.RATIOS)
    assert found["compute"].used_for == "calibration"
    for method in ("dense", "topk", "local4"):
        row = found[method]
        assert row.used_for == "validation"
        assert row.measured == pytest.approx(table[method][0] / FREE)
        assert row.predicted == pytest.approx(row.measured, rel=1e-3)
        assert row.low is not None and row.high is not None and row.low <= row.measured <= row.high
    # what top-k takes to compute is not in the dense profile
    alone = rows(own_hosts_rows.WHAT_IF)["topk"]
    assert alone.predicted == pytest.approx((FREE + GATHER_MS) / FREE, rel=1e-3)
    # a rank of the profile had a core, four of the hosts share two
    assert rows(own_hosts_rows.ABSOLUTE)["dense"].predicted == pytest.approx(2 * 65.0 + RING_MS)
    assert {row.used_for for row in rows(own_hosts_rows.FITTED).values()} == {"calibration"}


def test_ranks_that_share_cores_wait_less_for_the_last() -> None:
    """Against ranks that are simulated moment by moment, each with an equal part of the cores."""
    random = np.random.default_rng(0)
    for ranks, cores in ((2, 2), (4, 4), (4, 2), (8, 2), (4, 1), (6, 4)):
        ends, alone = [], []
        for _ in range(4000):
            work = np.sort(random.normal(1.0, 0.05, ranks))
            at = done = 0.0
            for k, each in enumerate(work):
                at, done = at + (each - done) * max(1.0, (ranks - k) / cores), each
            ends.append(at / max(1.0, ranks / cores))
            alone.append(work[-1])
        simulated = (np.mean(ends) - 1) / (np.mean(alone) - 1)
        assert own_hosts_rows.shared_wait(ranks, cores) == pytest.approx(simulated, abs=0.03), (ranks, cores)
    assert own_hosts_rows.shared_wait(4, 4) == pytest.approx(1.0)
    assert own_hosts_rows.shared_wait(4, 1) == pytest.approx(0.0, abs=1e-9)


def test_methods_foreseen_in_another_order_are_told(table: dict[str, list[float]]) -> None:
    assert own_hosts_rows.disordered(own_hosts_rows.rows()) == ([], 3)
    path = own_hosts_rows.HERE / "own-hosts.json.gz"
    found = anchored.measured(path)
    found["turns"][0]["step_ms"]["topk"] = [2 * FREE, 2.1 * FREE]
    written.compressed(path, found)
    own_hosts_rows.measured.cache_clear()
    wrong, pairs = own_hosts_rows.disordered(own_hosts_rows.rows())
    assert pairs == 3
    assert sorted(wrong) == [
        "pytorch, 50 Mbit/s, dense was faster than topk",
        "pytorch, 50 Mbit/s, local4 was faster than topk",
    ]


def test_nothing_is_told_of_what_was_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_hosts_rows, "HERE", tmp_path)
    assert list(own_hosts_rows.rows()) == []
    assert own_hosts_rows.disordered([]) == ([], 0)


def test_a_turn_takes_as_long_as_on_its_slowest_rank() -> None:
    every = [(name, [[0.1, 0.3], [0.2, 0.1]]) for name in own_hosts.SIDES]
    again = [("compute", [[0.1, 0.1], [0.4, 0.4]])]
    first, second = own_hosts.in_turns.turn_ms([every, every + again])
    assert (first["dense"], second["dense"]) == pytest.approx((200.0, 200.0))
    assert (first["compute"], second["compute"]) == pytest.approx((200.0, 300.0))


@pytest.mark.thorough
def test_methods_take_turns_over_starved_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_hosts, "ROUNDS", 1)
    sides = {"dense": ([], 1, 2), "compute": (own_hosts.SIDES["compute"][0], 1, 2)}
    monkeypatch.setattr(own_hosts, "SIDES", sides)
    monkeypatch.setattr(own_hosts, "TURNS", ["dense", "compute", "compute"])
    with starving.network(4, 10.0) as network:
        before = network.sent_bytes()["h4"]
        found = own_hosts.turns(network, "pytorch", tmp_path)
        sent = network.sent_bytes()["h4"] - before
    ((once,), load) = found["rounds"], found["load"]
    assert sorted(name for name, _ in once) == ["compute", "compute", "dense"]
    assert all([len(steps) for steps in ranks] == [2] * 4 for _, ranks in once)
    assert 0 <= load <= 1
    # A ring of 1.09 MB carries 1.5 times that over each link: 1.3 s, however quick the machine is. Of the nine steps of
    # three turns, the three of `dense` send; that the others do not is counted in bytes, which no busy machine changes.
    ring = 1.5 * 4 * 272_474
    assert own_hosts.in_turns.turn_ms([once])[0]["dense"] > 0.95 * 8e-3 * ring / 10.0
    assert 3 * ring < sent < 4.5 * ring
