"""What every prediction must obey, over random workloads, clusters, policies and settings.

`make check-simulator` tries 4,000 examples of each, `make test` a few; the examples are the same each time.

The tie rule: under `horovod` a cycle fuses what is ready when it begins. Whatever moves cycles against gradients (a
faster link or device, fewer bytes) can leave a gradient to the next cycle, so it may lengthen a step by a cycle with
its negotiation and the latency of another collective for each cycle of the step. All other policies obey to the last
digit.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hvdkit.simulator import step
from hvdkit.simulator.calibration import Calibration
from hvdkit.simulator.cluster import Cluster
from hvdkit.simulator.compression_costs import CompressionSetting
from hvdkit.simulator.costs import ClusterLinks, balanced_servers
from hvdkit.simulator.jitter import slowest
from hvdkit.simulator.policies import POLICIES
from hvdkit.simulator.predict import Point, point
from hvdkit.simulator.settings import LinkSetting, Settings, applied
from hvdkit.simulator.workload import Gradient, Workload
from tests import simulating

pytestmark = pytest.mark.check

EXAMPLES = int(os.environ.get("HVDKIT_TEST_EXAMPLES", "40"))
many = settings(max_examples=EXAMPLES)
TINY = 1e-9
OPERATIONS = ("allreduce", "allgather", "alltoall", "broadcast", "reducescatter")


@st.composite
def pieces(draw: st.DrawFn) -> list[dict[str, float]]:
    """A link whose larger messages have a higher rate and more latency, without a jump: as protocols switch."""
    latency, rate = draw(st.floats(0.5, 200)), draw(st.floats(50, 20_000))
    found = [{"from_bytes": 0, "latency_us": latency, "mbit_per_s": rate}]
    for start in sorted(draw(st.sets(st.integers(64, 10**7), max_size=2))):
        faster = rate * draw(st.floats(1.1, 8))
        latency += 8 * start * (1 / rate - 1 / faster)
        rate = faster
        found.append({"from_bytes": start, "latency_us": latency, "mbit_per_s": rate})
    return found


@st.composite
def clusters(draw: st.DrawFn, algorithms: tuple[str, ...] = ("ring", "tree", "hierarchical")) -> Cluster:
    """One level or two, rated or crowded."""
    local = draw(st.sampled_from([1, 1, 2, 4, 8]))
    levels: list[dict[str, Any]] = [{"name": "far", "pieces": draw(pieces()), "busy": draw(st.floats(0, 0.6))}]
    levels[0]["contention"] = draw(st.sampled_from([0.0, 0.0, 0.1]))
    if local > 1:
        levels.insert(0, {"name": "near", "ranks": local, "pieces": draw(pieces())})
    return simulating.cluster(
        ranks_per_host=local,
        levels=levels,
        device={"name": "any", "memory_bytes_per_s": draw(st.floats(1e8, 1e12)), "launch_us": draw(st.floats(0, 20))},
        software={
            "algorithms": draw(st.lists(st.sampled_from(algorithms), min_size=1, max_size=2, unique=True)),
            "negotiation_us": draw(st.floats(0, 500)),
            "negotiation_us_per_doubling": draw(st.floats(0, 100)),
            "negotiation_us_per_rank": draw(st.floats(0, 5)),
            "synchronous": draw(st.booleans()),
            "several_hosts_us": draw(st.sampled_from([0.0, 5000.0])),
            "staging_bytes_per_s": draw(st.sampled_from([None, None, 1e9])),
        },
        residual_percent=draw(st.floats(5, 30)),
        jitter=draw(st.floats(0, 0.1)),
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    layers = draw(st.lists(st.tuples(st.floats(1e-5, 2e-2), st.integers(1, 3 * 10**6)), min_size=1, max_size=10))
    tensors = tuple(Gradient(f"t{i}", f"t{i}", (size,), 4 * size, seconds) for i, (seconds, size) in enumerate(layers))
    forward = tuple((tensor.name, tensor.segment_s / 2) for tensor in tensors)
    return Workload("any", 32, forward, tensors, tail_s=1e-4, update_s=draw(st.floats(0, 1e-3)))


@st.composite
def cases(draw: st.DrawFn, **more: Any) -> step.Case:
    return step.Case(
        draw(workloads()),
        ClusterLinks(draw(clusters()), draw(st.integers(2, 600))),
        draw(st.sampled_from(sorted(POLICIES))),
        threshold_bytes=draw(st.floats(0, 3e7)),
        cycle_s=draw(st.floats(1e-4, 0.01)),
        bucket_bytes=draw(st.floats(1e4, 3e7)),
        streams=draw(st.sampled_from([1, 1, 1, 2, 4])),
        **more,
    )


def over(case: step.Case, cluster: Cluster) -> step.Case:
    return replace(case, network=ClusterLinks(cluster, case.network.ranks, case.network.hosts))


def not_slower(better: step.Case, than: step.Case) -> None:
    """By the tie rule of this file."""
    quick, slow = step.period(better), step.period(than)
    tie = 0.0
    if than.rules.buckets is POLICIES["horovod"].buckets:
        cycles = min(len(than.workload.tensors), 1 + than.parts.backward_s * than.work / max(than.cycle_s, 1e-9))
        each = sum(float(cost.line(1.0)) for cost in than.costs) + than.wire * than.network.negotiation_s
        device = than.network.cluster.device
        tie = than.cycle_s + cycles * (each + 2e-6 * device.launch_us)
        # a bucket that is sent alone is not copied, one with another is
        tie += 4 * sum(tensor.bytes for tensor in than.workload.tensors) / device.memory_bytes_per_s
    assert quick <= slow * (1 + TINY) + tie


@given(cases(), st.floats(1.0001, 50))
@many
def test_more_bandwidth_is_never_slower(case: step.Case, times: float) -> None:
    levels = case.network.cluster.levels
    links = {level.name: LinkSetting(mbit_per_s=level.pieces[-1].mbit_per_s * times) for level in levels}
    not_slower(over(case, applied(case.network.cluster, Settings(link=links))), case)


@given(cases(), st.floats(0, 1))
@many
def test_less_latency_is_never_slower(case: step.Case, part: float) -> None:
    levels = case.network.cluster.levels
    links = {level.name: LinkSetting(latency_us=level.pieces[0].latency_us * part) for level in levels}
    not_slower(over(case, applied(case.network.cluster, Settings(link=links))), case)


@given(cases())
@many
def test_half_the_bytes_are_never_slower_than_all(case: step.Case) -> None:
    """Cast to fp16, with the time for the casts taken away."""
    assume(case.network.cluster.software.staging_bytes_per_s is None)
    not_slower(replace(case, compression=CompressionSetting(method="fp16"), compression_s=0.0), case)


@given(cases(), st.floats(1.0001, 20))
@many
def test_a_faster_device_is_never_slower(case: step.Case, times: float) -> None:
    not_slower(replace(case, speed=times), case)


@given(cases(), st.floats(0.01, 1))
@many
def test_a_smaller_batch_is_never_slower_but_never_proportionally_faster(case: step.Case, part: float) -> None:
    smaller = replace(case, batch=part)
    not_slower(smaller, case)
    assert step.period(smaller.alone) >= part * step.period(case.alone) * (1 - TINY)


@given(st.integers(2, 10**6), st.floats(0, 1), st.floats(0, 1))
@many
def test_less_jitter_waits_less(ranks: int, one: float, other: float) -> None:
    less, more = sorted((one, other))
    assert slowest(ranks, 1, less, 1).mean() <= slowest(ranks, 1, more, 1).mean() * (1 + TINY)


@given(cases())
@many
def test_a_change_that_changes_nothing_changes_nothing(case: step.Case) -> None:
    cluster = case.network.cluster
    links = {
        level.name: LinkSetting(
            mbit_per_s=level.pieces[-1].mbit_per_s,
            latency_us=level.pieces[0].latency_us,
            busy=level.busy,
            ports=level.ports,
        )
        for level in cluster.levels
    }
    assert applied(cluster, Settings(link=links)) is cluster


@given(cases(), st.integers(0, 10**4))
@many
def test_more_servers_than_ranks_are_as_many_as_ranks(case: step.Case, more: int) -> None:
    ranks = case.network.ranks
    central = replace(case, policy="central", servers=ranks)
    assert step.period(replace(central, servers=ranks + more)) == step.period(central)
    not_slower(central, replace(central, servers=1))


@given(cases(), st.integers(1, 8))
@many
def test_more_streams_are_never_slower(case: step.Case, more: int) -> None:
    quick, slow = step.period(replace(case, streams=case.streams + more)), step.period(case)
    assert quick <= slow * (1 + TINY)
    assert step.periods([case, replace(case, streams=1), case])[::2] == pytest.approx(slow)


@given(st.lists(st.integers(1, 10**8), min_size=1, max_size=30), st.integers(1, 40))
@many
def test_servers_with_whole_tensors_are_as_slow_as_the_busiest(sizes: list[int], servers: int) -> None:
    balanced = balanced_servers(sizes, servers)
    busiest = sum(sizes) / balanced
    assert max(max(sizes), sum(sizes) / servers) * (1 - TINY) <= busiest <= max(sizes) + sum(sizes) / servers
    assert balanced <= balanced_servers(sizes, servers + 1) * (1 + TINY)


@given(st.integers(2, 10**6), st.floats(0, 1000), st.floats(0, 10))
@many
def test_negotiation_grows_by_the_cache_or_by_the_coordinator(ranks: int, doubling: float, each: float) -> None:
    software = {"negotiation_us": 10.0, "negotiation_us_per_doubling": doubling, "negotiation_us_per_rank": each}
    made = simulating.cluster(software=software)
    more = ClusterLinks(made, 2 * ranks).negotiation_s - ClusterLinks(made, ranks).negotiation_s
    assert more == pytest.approx(1e-6 * (doubling + each * ranks), rel=1e-6, abs=1e-12)


@given(clusters(("ring", "tree", "hierarchical", "halving-doubling")), st.integers(2, 5000), st.integers(1, 10**9))
@many
def test_every_collective_rises_with_the_bytes_and_has_no_jumps(cluster: Cluster, ranks: int, size: int) -> None:
    network = ClusterLinks(cluster, ranks)
    for operation in OPERATIONS:
        line = network.cost(operation).line  # type: ignore[arg-type]
        at = np.sort(np.concatenate([line.starts, line.starts[1:] * (1 - 1e-9), [size, size * 1.5, 10 * size]]))
        seconds = line(at)
        assert (np.diff(seconds) >= -1e-9 * seconds[1:]).all(), operation
        before, after = line(line.starts[1:] * (1 - 1e-9)), line(line.starts[1:])
        assert after == pytest.approx(before, rel=1e-5, abs=1e-12), operation


@given(cases(), st.integers(1, 600))
@many
def test_images_per_rank_never_rise_with_ranks(case: step.Case, more: int) -> None:
    network = case.network
    not_slower(case, replace(case, network=ClusterLinks(network.cluster, network.ranks + more)))


@given(cases())
@many
def test_top_k_of_everything_is_dense(case: step.Case) -> None:
    whole = replace(case, compression=CompressionSetting(method="topk", ratio=1.0))
    assert step.period(whole) == pytest.approx(step.period(case))


@given(cases())
@many
def test_local_sgd_tends_to_compute(case: step.Case) -> None:
    seldom = step.period(replace(case, every=2**31))
    assert seldom == pytest.approx(step.period(case.alone), rel=1e-3, abs=1e-5)


@given(workloads(), clusters())
@many
def test_one_rank_is_the_profile(work: Workload, cluster: Cluster) -> None:
    found = point(Calibration(work, Settings(policy="horovod"), 3.0), cluster, 1, Settings())
    assert found.step_ms == pytest.approx(1e3 * (work.compute_s + work.update_s))
    assert found.efficiency == pytest.approx(1.0)


@given(clusters(), st.integers(2, 500), st.floats(1, 1e9))
@many
def test_two_levels_with_one_rank_a_host_are_one(cluster: Cluster, ranks: int, size: float) -> None:
    spread = ClusterLinks(cluster, ranks, hosts=ranks)
    ring, two = spread.cost("allreduce", "ring").line, spread.cost("allreduce", "hierarchical").line
    assert float(two(size)) == pytest.approx(float(ring(size)))


@given(cases())
@many
def test_no_bound_is_beaten(case: step.Case) -> None:
    seconds = step.period(case)
    assert seconds >= step.period(case.alone) * (1 - TINY)
    ring = replace(case, algorithm="ring")
    bytes_s = max(8e-6 / level.pieces[-1].mbit_per_s for level, _ in case.network.levels)
    ranks = case.network.ranks
    sent = 2 * (ranks - 1) / ranks * sum(tensor.bytes for tensor in case.workload.tensors)
    assert step.period(ring) >= sent * bytes_s * (1 - TINY)


# -- intervals --------------------------------------------------------------------------------------------------------


def asked(work: Workload, cluster: Cluster, ranks: int, policy: str, **more: Any) -> Point:
    """From a profile that shows overlap: the doubt whether there is any is of another kind, and ends as it shrinks."""
    found = Calibration(work, Settings(policy=policy), 3.0, overlap_shown=True)
    return point(found, cluster, ranks, Settings(**more))


def not_narrower(far: Point, near: Point) -> None:
    assert far.high_ms / far.step_ms >= near.high_ms / near.step_ms * (1 - TINY)
    assert far.step_ms / far.low_ms >= near.step_ms / near.low_ms * (1 - TINY)


WHOLE = st.sampled_from(sorted(set(POLICIES) - {"horovod"}))


@given(workloads(), clusters(), st.integers(1, 300), st.sampled_from([2, 4, 16, 1024]), st.integers(1, 256), WHOLE)
@many
def test_intervals_do_not_narrow_with_ranks(
    work: Workload, cluster: Cluster, ranks: int, times: int, size: int, policy: str
) -> None:
    """At any batch: at batch size 1 one narrowed from a factor of 8.2 on one rank to 4.0."""
    not_narrower(*(asked(work, cluster, count, policy, batch_size=size) for count in (ranks * times, ranks)))


@given(workloads(), clusters(), st.integers(1, 300), st.floats(1, 30), st.floats(1, 4), st.booleans(), WHOLE)
@many
def test_intervals_do_not_narrow_with_the_batch_or_the_device(
    work: Workload, cluster: Cluster, ranks: int, one: float, more: float, up: bool, policy: str
) -> None:
    """On one rank, and where communication, of which less is known than of compute, keeps its share of the step."""
    for count, grows in ((1, up), (ranks, True)):
        far, near = (one * more, one) if grows else (1 / (one * more), 1 / one)
        sizes = [max(1, round(32 / part)) for part in (far, near)]
        not_narrower(*(asked(work, cluster, count, policy, batch_size=size) for size in sizes))
        not_narrower(*(asked(work, cluster, count, policy, speed=part) for part in (far, near)))


@given(workloads(), clusters(), st.integers(2, 300), st.floats(0, 100), st.floats(0, 100), WHOLE)
@many
def test_a_link_that_varies_more_makes_no_interval_narrower(
    work: Workload, cluster: Cluster, ranks: int, one: float, other: float, policy: str
) -> None:
    found = []
    for percent in sorted((one, other)):
        levels = [level.model_copy(update={"varies_percent": percent}) for level in cluster.levels]
        found.append(asked(work, cluster.model_copy(update={"levels": levels}), ranks, policy))
    steady, varying = found
    assert varying.step_ms == steady.step_ms
    assert varying.low_ms <= steady.low_ms * (1 + TINY) and varying.high_ms >= steady.high_ms * (1 - TINY)
