"""No two answers contradict each other: properties over random cases, each of which was once broken.

Every case is drawn from its seed, so each run tries the same.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import anchored
from benchmarks.validation_sets import k80_cluster
from hvdkit.errors import RequestError
from hvdkit.profiling import published
from hvdkit.results.profile import Latency, Spread
from hvdkit.simulator import cluster as clusters
from hvdkit.simulator.advise import advise
from hvdkit.simulator.calibration import Calibration, calibrate, own_network
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.compression_costs import CompressionSetting
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.simulator.forecast import Forecast, forecasts
from hvdkit.simulator.money import Money
from hvdkit.simulator.piecewise_linear import of_measured
from hvdkit.simulator.predict import point, predict
from hvdkit.simulator.settings import LinkSetting, Settings, applied
from hvdkit.simulator.step import Case, period
from tests import simulating

pytestmark = pytest.mark.check

OPERATIONS = ("allreduce", "allgather", "alltoall", "reducescatter")  # of steps
SEARCHED = [*range(9), 107, 448, 1144]  # random what-ifs, and some whose intervals narrowed; thousands were tried once
SIZES = [4.0 * 1.7**i for i in range(36)]
FINELY = np.geomspace(1.0, 1e12, 4000)


def curve(drawn: random.Random, ranks: int, slower: float = 1.0, **more: Any) -> dict[str, Any]:
    """A measured allreduce whose protocol switches to more latency and a higher rate, with a jump up or down."""
    latency, rate = slower * drawn.uniform(10, 500), drawn.uniform(500, 5000) / slower
    pieces = [{"from_bytes": 0, "latency_us": latency, "mbit_per_s": rate}]
    for start in sorted(drawn.sample(range(500, 200_000), drawn.randint(0, 2))):
        faster = rate * drawn.uniform(1.1, 4)
        ends = latency + 8 * start / rate
        latency = max(0.0, ends * drawn.uniform(0.5, 3) - 8 * start / faster)
        rate = faster
        if latency + 8 * start / rate > 0.3 * ends:  # a cluster file takes no greater fall
            pieces.append({"from_bytes": start, "latency_us": latency, "mbit_per_s": rate})
    known = {"residual_percent": 3.0, "smallest_bytes": 4, "largest_bytes": 10**6}
    return {"operation": "allreduce", "ranks": ranks, "pieces": pieces} | known | more


def measured(seed: int) -> Cluster:
    """One to three numbers of hosts were measured; more took no less."""
    drawn = random.Random(seed)
    counts = sorted(drawn.sample([2, 3, 4, 6, 8, 16, 24], drawn.randint(1, 3)))
    algorithm = drawn.choice(["ring", "ring", "tree"])
    while True:
        rows = [curve(drawn, count, 1.5**place, algorithm=algorithm) for place, count in enumerate(counts)]
        made = simulating.cluster(measured=rows, software={"algorithms": [algorithm]})
        lines = [of_measured(row.pieces, row.largest_bytes)(FINELY) for row in made.measured]
        if all((more >= fewer).all() for fewer, more in itertools.pairwise(lines)):
            return made


@pytest.mark.parametrize("seed", range(16))
def test_more_hosts_never_take_less_time(seed: int) -> None:
    """A protocol switch was carried over by the size of a message: 0.81 ms on 12 hosts, 0.40 on 16."""
    made = measured(seed)
    for operation in OPERATIONS:
        before = np.zeros(len(SIZES))
        for hosts in (2, 3, 4, 5, 6, 7, 8, 12, 16, 20, 24, 32, 100, 1000):
            seconds = ClusterLinks(made, hosts).cost(operation).line(np.array(SIZES))  # type: ignore[arg-type]
            assert (seconds >= before * (1 - 1e-9)).all(), (operation, hosts)
            before = seconds


@pytest.mark.parametrize("seed", range(8))
def test_between_two_measured_numbers_of_hosts_times_lie_between(seed: int) -> None:
    made = measured(seed)
    ends = [row.ranks for row in made.measured]
    lines = {count: ClusterLinks(made, count).cost("allreduce").line(np.array(SIZES)) for count in range(2, 25)}
    for low, high in itertools.pairwise(ends):
        for count in range(low, high + 1):
            assert (lines[low] <= lines[count] * (1 + 1e-9)).all() and (lines[count] <= lines[high] * (1 + 1e-9)).all()


@pytest.mark.parametrize("seed", range(12))
def test_top_k_is_never_predicted_slower_to_send_than_all(seed: int) -> None:
    """It fell back by bytes, where latencies decide; and more hosts take no less time."""
    drawn = random.Random(seed)
    made = simulating.cluster(latency_us=10 ** drawn.uniform(0, 3), mbit_per_s=10 ** drawn.uniform(1, 5))
    compression = CompressionSetting(method="topk", ratio=10 ** drawn.uniform(-3, -0.5))
    work, before = simulating.workload("resnet20", 0.05, 10), 0.0
    for ranks in (2, 3, 4, 8, 16, 32, 64, 128, 512):
        dense = Case(work, ClusterLinks(made, ranks), "grouped", threshold_bytes=1e12)
        sparse = Case(work, dense.network, "grouped", compression, compression_s=0.0, threshold_bytes=1e12)
        seconds = period(sparse)
        assert before * (1 - 1e-9) <= seconds <= period(dense) * (1 + 1e-9), ranks
        before = seconds


@pytest.mark.parametrize("seed", range(10))
def test_what_does_not_fit_is_refused_with_the_largest_batch_that_does(seed: int) -> None:
    """GPT-2 at batch 32 on a V100 was 2.03 × as fast, sure; batch 100,000 had a step time."""
    drawn = random.Random(seed)
    model, batch, speed = drawn.choice([("resnet50", 256, 1200.0), ("resnet18", 128, 2000.0), ("gpt2", 8, 20_000.0)])
    figure = {"tokens_per_second": speed} if model == "gpt2" else {}
    profile = published.profile(model, None if figure else speed, batch, "V100", **figure)
    place = clusters.load(Path(drawn.choice(["aws-p3-16xlarge", "v100-nvlink-ib"])))
    ranks = drawn.choice([1, 8, 64])
    with pytest.raises(
        RequestError, match=r"needs about .* of which a tenth stays free; give --set batch_size="
    ) as said:
        predict(profile, place, [ranks], Settings(batch_size=100_000))
    most = int(str(said.value).partition("give --set batch_size=")[2].split()[0])
    (fits,) = predict(profile, place, [ranks], Settings(batch_size=most)).points
    assert place.device.memory_mib and fits.memory_mib and fits.memory_mib <= 0.9 * place.device.memory_mib
    with pytest.raises(RequestError, match=r"needs about"):
        predict(profile, place, [ranks], Settings(batch_size=most + 1))
    if seed < 3:
        made = advise(profile, place, ranks, Settings(), Money())
        sizes = [change.settings["batch_size"] for change in made.suggestions if set(change.settings) == {"batch_size"}]
        assert all(size <= most for size in sizes)
        assert not made.left_out or all("batch_size=" in why or "topk" in what for what, why in made.left_out.items())


def asked(seed: int) -> tuple[Calibration, Cluster, int, Settings]:
    """A profile of one GPU that shows overlap, links, ranks, and a what-if."""
    drawn = random.Random(seed)
    made = simulating.cluster(latency_us=10 ** drawn.uniform(0, 3), mbit_per_s=10 ** drawn.uniform(2, 5))
    if drawn.random() < 0.5:
        made = simulating.cluster(measured=[curve(drawn, drawn.choice([2, 4]))])
    policy = drawn.choice(["ddp", "grouped", "mg-wfbp", "caffe-mpi"])
    fitted = Calibration(simulating.workload("resnet20", 0.05, 10), Settings(policy=policy), 3.0, overlap_shown=True)
    return fitted, made, 2 ** drawn.randint(1, 7), Settings(batch_size=2 ** drawn.randint(0, 8))


@pytest.mark.parametrize("seed", range(20))
def test_the_upper_end_does_not_rise_with_a_better_link(seed: int) -> None:
    fitted, made, ranks, what = asked(seed)
    level, times = made.levels[0], random.Random(seed).uniform(1.05, 20)
    better = applied(made, Settings(link={"net": LinkSetting(mbit_per_s=level.pieces[-1].mbit_per_s * times)}))
    slow, fast = (point(fitted, links, ranks, what) for links in (made, better))
    assert fast.step_ms <= slow.step_ms * (1 + 1e-6) and fast.high_ms <= slow.high_ms * (1 + 1e-3)


@pytest.mark.parametrize("seed", range(10))
def test_a_profile_of_n_ranks_asked_for_n_ranks_is_the_profile(seed: int) -> None:
    """302.0 ms measured on 8 ranks were 313.7 ms predicted for 8: a cluster's assumed jitter beat the measured one."""
    drawn = random.Random(seed)
    ranks, spread = drawn.choice([1, 2, 4, 8]), drawn.choice([0.0, 0.1])
    quiet = simulating.profile(ranks, forward_ms=drawn.uniform(10, 50), backward_ms=drawn.uniform(20, 100))
    mean = quiet.step.compute_ms.mean
    varies = {"low": mean * (1 - spread / 2), "high": mean * (1 + spread / 2)}
    split = quiet.step.model_copy(update={"compute_ms": quiet.step.compute_ms.model_copy(update=varies)})
    longer = quiet.step.step_ms.mean * drawn.uniform(0.95, 1.1)  # than the sum of its parts
    split = split.model_copy(update={"step_ms": split.step_ms.model_copy(update={"mean": longer})})
    each = [rank.model_copy(update={"split": split}) for rank in quiet.ranks]
    times = [(4, 1.0), (2**20, 3.0), (2**22, 9.0)]
    spreads = [(size, Spread(mean=ms, median=ms, low=ms, high=ms)) for size, ms in times]
    timed = [Latency(operation="allreduce", bytes=size, ms=ms, samples=3) for size, ms in spreads]
    profile = quiet.model_copy(update={"step": split, "ranks": each, "latencies": timed if ranks > 1 else []})
    links = own_network(profile) or simulating.cluster(jitter=0.05)
    (same,) = predict(profile, links.model_copy(update={"jitter": 0.05}), [ranks], Settings()).points
    assert same.step_ms == pytest.approx(longer, rel=2e-3)
    assert same.low_ms <= longer <= same.high_ms


def test_beyond_the_measured_hosts_the_stated_error_is_what_extrapolation_is_worth() -> None:
    """From 2 nodes to 4, by published allreduces: 6.8 % was stated where they lay 32 % off."""
    whole = k80_cluster()
    from_two = whole.model_copy(update={"measured": [row for row in whole.measured if row.ranks == 2]})
    cost = ClusterLinks(from_two, 4).cost("allreduce")
    rows = [(float(r["message_bytes"]), 1e-6 * float(r["allreduce_us"])) for r in anchored.table("osu_allreduce_10gbe")
            if r["nodes"] == "4"]  # fmt: skip
    ratios = [float(cost.line(size)) / seconds for size, seconds in rows]
    inside = [max(ratio, 1 / ratio) <= 1 + cost.residual_percent / 100 for ratio in ratios]
    assert len(rows) == 266 and 0.85 <= sum(inside) / len(rows) <= 0.98
    assert ClusterLinks(whole, 4).cost("allreduce").residual_percent < 10, "what was measured is as it was"


def test_what_is_sure_comes_first_then_usual_remedies_and_scaled_devices_are_not_sure() -> None:
    profile = published.profile("gpt2", None, 8, "V100", 20_000.0)
    made = advise(profile, clusters.load(Path("aws-p3-16xlarge")), 64, Settings(), Money())
    for kind in ("software", "hardware"):
        sure = [change.sure for change in made.suggestions if change.kind == kind]
        assert sure == sorted(sure, reverse=True)
    assert made.suggestions[0].what.startswith("accumulate")
    assert not any(change.sure for change in made.suggestions if {"speed", "link"} & change.settings.keys())
    assert not any(change.points_lost for change in made.suggestions), "a GPT's were never measured"


@pytest.mark.parametrize("name", ["v100-nvlink-ib", "a100-nvlink-ib", "h100-nvlink-ib"])
def test_top_k_is_a_loss_on_fast_networks(name: str) -> None:
    """As Vogels et al. 2019 report: choosing the values takes longer than sending all."""
    profile, place = published.profile("resnet50", 1200, 64, "V100"), clusters.load(Path(name))
    dense, sparse = (
        predict(profile, place, [16], Settings(policy="ddp", compression=compression)).points[0]
        for compression in (None, CompressionSetting(method="topk", ratio=0.01))
    )
    assert sparse.step_ms > 1.01 * dense.step_ms
    assert any("is assumed to take 15 ns each" in line for line in sparse.warnings), "no GPU was timed"


def what_if(seed: int) -> tuple[Calibration, Cluster, tuple[int, int], Settings]:
    """A published figure on a cluster that comes with hvdkit, a smaller and a larger number of ranks, and a what-if."""
    drawn = random.Random(seed)
    model, batch, speed = drawn.choice([("resnet50", 64, 350.0), ("resnet18", 128, 1100.0), ("resnet152", 32, 120.0)])
    place = clusters.load(Path(drawn.choice(clusters.shipped())))
    keys: dict[str, Any] = {
        "policy": drawn.choice([None, "ddp", "grouped", "mg-wfbp", "caffe-mpi", "central"]),
        "batch_size": drawn.choice([None, None, 1, 2, 8, 16]),
        "compression": drawn.choice([None, None, "fp16", "topk", "powersgd"]),
        "speed": drawn.choice([1.0, 1.0, 0.5, 2.0]),
        "jitter": drawn.choice([None, None, 0.0, 0.1]),
        "allreduce": drawn.choice([None, None, "ring", "tree"]),
    }
    few = drawn.choice([1, 2, place.ranks_per_host, 2 * place.ranks_per_host])
    few, many = (min(count, place.largest or 4096) for count in (few, few * drawn.choice([2, 3, 4, 8])))
    return calibrate(published.profile(model, speed, batch, "V100")), place, (few, many), Settings(**keys)


def forecast(fitted: Calibration, place: Cluster, ranks: int, what: Settings) -> Forecast:
    return forecasts(fitted, [fitted.case(place, ranks, what)], 1)[0]


@pytest.mark.parametrize("seed", SEARCHED)
def test_random_what_ifs_on_clusters_that_come_with_hvdkit_do_not_contradict_each_other(seed: int) -> None:
    """Of 1,400, 10 intervals narrowed with ranks, by up to 24 %; the three widest where top-k is left out over more.

    Of 722, two steps took longer over a better link, and two trees less time.
    """
    fitted, place, (few, many), what = what_if(seed)
    near, far = (forecast(fitted, place, count, what) for count in (few, many))
    assert near.low <= near.seconds <= near.high and far.low <= far.seconds <= far.high
    sent, sent_by_many = ([phase.operation for phase in one.drawn.base.traffic.phases] for one in (near, far))
    if sent == sent_by_many:
        assert far.high / far.low >= near.high / near.low * (1 - 1e-3)
    if few % place.ranks_per_host == 0 and what.compression is None:  # top-k may be left out over more ranks
        assert far.seconds >= near.seconds * (1 - 2e-3)
    level = random.Random(seed).choice(place.levels)
    link = LinkSetting(mbit_per_s=level.pieces[-1].mbit_per_s * random.Random(seed).uniform(1.05, 20))
    better = forecast(fitted, applied(place, Settings(link={level.name: link})), many, what)
    assert better.seconds <= far.seconds * (1 + 2e-3) and better.high <= far.high * (1 + 2e-3)
