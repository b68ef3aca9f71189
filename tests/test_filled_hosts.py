"""What one device's figure leaves out when hosts fill up: the constants, and what every prediction of it obeys."""

from __future__ import annotations

import itertools
import random

import pytest

from benchmarks import filled_hosts_rows
from hvdkit.simulator import crowding
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.simulator.predict import point
from hvdkit.simulator.settings import Settings
from tests import simulating

pytestmark = pytest.mark.check


def test_the_constants_are_the_fit_to_the_named_pairs() -> None:
    fitted = filled_hosts_rows.fit(filled_hosts_rows.pairs())
    assert [*crowding.IN_HOST.values(), *crowding.BETWEEN_HOSTS.values()] == pytest.approx(fitted, abs=6e-4)


def test_a_set_that_is_left_out_is_predicted_better_than_without_the_constants_or_overlap() -> None:
    for one in filled_hosts_rows.left_out():
        assert abs(one["others"][0]) <= 6 and one["others"][1] <= 9, one["set"]
        assert one["others"][1] < min(one["without"][1], one["plain"][1] + 0.1), one["set"]


def asked(seed: int) -> tuple[Calibration, Cluster, Settings]:
    """A profile of one GPU, hosts with two levels of links, and a what-if."""
    drawn = random.Random(seed)
    levels = [
        {
            "name": name,
            "ranks": ranks,
            "pieces": [{"from_bytes": 0, "latency_us": 10 ** drawn.uniform(0, 2), "mbit_per_s": rate}],
        }
        for name, ranks, rate in (("near", 8, 10 ** drawn.uniform(4, 6)), ("far", None, 10 ** drawn.uniform(3, 5)))
    ]
    made = simulating.cluster(levels=levels, ranks_per_host=8, jitter=drawn.choice([0.0, 0.03]))
    work = simulating.workload(drawn.choice(["resnet20", "resnet50"]), 10 ** drawn.uniform(-2, 0))
    policy = drawn.choice(["ddp", "horovod", "grouped", "mg-wfbp"])
    fitted = Calibration(work, Settings(policy=policy), drawn.choice([3.0, None]), mixed=drawn.random() < 0.5)
    what = drawn.choice([{}, {}, {"batch_size": drawn.choice([16, 128])}, {"speed": drawn.uniform(0.5, 4)}])
    return fitted, made, Settings(**what)


@pytest.mark.parametrize("seed", range(30))
def test_the_fast_end_is_never_above_linear_scaling(seed: int) -> None:
    fitted, made, what = asked(seed)
    one, many = (point(fitted, made, ranks, what) for ranks in (1, random.Random(seed).choice([2, 4, 8, 16, 64])))
    assert many.low_ms >= one.low_ms * (1 - 1e-9)
    if what == Settings():
        assert one.low_ms == pytest.approx(one.step_ms)
        assert many.images_per_second < many.ranks * one.images_per_second


@pytest.mark.parametrize("seed", range(12))
def test_more_full_hosts_never_make_a_step_shorter(seed: int) -> None:
    fitted, made, what = asked(seed)
    steps = [point(fitted, made, ranks, what).step_ms for ranks in (1, 2, 4, 8, 16, 32, 128)]
    cycle_ms = 1.5 if fitted.known.policy == "horovod" else 0.0  # whatever is ready goes with the next cycle
    assert all(more >= fewer * (1 - 1e-6) - cycle_ms for fewer, more in itertools.pairwise(steps))


@pytest.mark.parametrize("mixed", [False, True])
def test_a_host_is_not_filled_twice(mixed: bool) -> None:
    _, made, _ = asked(1)
    eight, many, lone = ClusterLinks(made, 8), ClusterLinks(made, 64), ClusterLinks(made, 1)

    def of_one(network: ClusterLinks, mixed: bool = mixed) -> float:
        return crowding.factor(1, 1, mixed, network)

    def of_host(network: ClusterLinks) -> float:
        return crowding.factor(8, 1, mixed, network)

    assert of_host(eight) == of_host(lone) == of_one(lone) == 1
    assert of_one(many) == pytest.approx(of_one(eight) * of_host(many))
    assert 1 < of_one(eight) < of_one(many) <= of_one(many, mixed=True)
    on_cpu = Calibration(simulating.workload("resnet20", 0.05, 10), Settings(), on_cpu=True)
    assert on_cpu.crowding(on_cpu.case(made, 64, Settings())) == 1
    assert of_one(ClusterLinks(made, 8, hosts=8)) == 1, "ranks with a host each"
