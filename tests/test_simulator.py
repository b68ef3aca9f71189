"""The simulator's engine and policies: what must hold for every graph, and the closed forms of the literature."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.errors import RequestError
from hvdkit.simulator import engine, policies, step
from hvdkit.simulator.compression_costs import METHODS, CompressionSetting
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.simulator.engine import Edge, StepSchedule, TimedTask
from hvdkit.simulator.policies import POLICIES
from hvdkit.simulator.workload import Gradient, Workload
from tests import simulating

pytestmark = pytest.mark.check

RESOURCES = (None, "device", "network", "input workers")
TINY = 1e-9


@st.composite
def graphs(draw: st.DrawFn) -> list[TimedTask]:
    """Up to 12 tasks, each waiting for some before it and for some of earlier iterations."""
    count = draw(st.integers(1, 12))
    seconds = st.floats(0, 10, allow_subnormal=False)
    tasks = []
    for number in range(count):
        before = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        earlier = draw(st.dictionaries(st.integers(0, count - 1), st.integers(1, 3), max_size=2))
        after = [Edge(f"t{i}") for i in sorted(before)] + [Edge(f"t{i}", lag) for i, lag in sorted(earlier.items())]
        tasks.append(TimedTask(f"t{number}", "any", draw(st.sampled_from(RESOURCES)), draw(seconds), tuple(after)))
    return tasks


def paths(graph: list[TimedTask]) -> float:
    """The longest chain of tasks that wait for each other within one iteration."""
    longest: dict[str, float] = {}
    for task in graph:
        longest[task.name] = task.seconds + max((longest[e.name] for e in task.after if e.lag == 0), default=0.0)
    return max(longest.values())


@given(graphs())
@settings(max_examples=150)
def test_no_task_before_its_inputs_and_no_resource_used_twice(graph: list[TimedTask]) -> None:
    run = engine.run(graph, 6)
    index = {task.name: number for number, task in enumerate(graph)}
    used: dict[str, list[tuple[float, float]]] = {}
    for iteration in range(6):
        for number, span in enumerate(run.spans(iteration)):
            assert span.end == pytest.approx(span.start + span.task.seconds)
            for edge in span.task.after:
                if iteration >= edge.lag:
                    assert span.start >= run.ends[iteration - edge.lag][index[edge.name]]
            if span.task.resource:
                used.setdefault(span.task.resource, []).append((span.start, span.end))
            assert number == index[span.task.name]
    for spans in used.values():
        for (_, end), (start, _) in itertools.pairwise(sorted(spans)):
            assert start >= end - TINY


def makespan(schedule: StepSchedule) -> float:
    """The end of the last task of all iterations."""
    return max(end for row in schedule.ends for end in row)


@given(graphs())
@settings(max_examples=150)
def test_makespan_is_at_least_the_critical_path_and_that_every_bound(graph: list[TimedTask]) -> None:
    run = engine.run(graph, 6)
    bounds = [paths(graph), *(6 * busy for busy in run.busy().values())]
    assert makespan(run) >= max(bounds) - TINY
    path = run.critical_path()
    for one, other in itertools.pairwise(path):
        assert other.start == pytest.approx(one.end, abs=TINY), "what decides has no gaps"
    if path:
        begin, end = float(run.ends[-2][-1]), float(run.ends[-1][-1])
        assert path[-1].end == pytest.approx(end)
        assert path[0].start <= begin + TINY or path[0].start == pytest.approx(0.0)
        length = sum(span.end - span.start for span in path)
        assert makespan(run) >= length - TINY
        assert length >= end - begin - TINY


def lags_of_inputs(graph: list[TimedTask]) -> dict[str, int]:
    """What the last task waits for, directly or not, and the iterations in between: the fewest of all ways."""
    waits = {task.name: [(edge.name, edge.lag) for edge in task.after] for task in graph}
    for name in {task.resource for task in graph} - {None}:
        queue = [task.name for task in graph if task.resource == name]
        for earlier, later in itertools.pairwise([queue[-1], *queue]):  # the first waits for the iteration before
            waits[later].append((earlier, int(later == queue[0])))
    lags, open_ = {graph[-1].name: 0}, [graph[-1].name]
    while open_:
        later = open_.pop()
        for earlier, lag in waits[later]:
            if lags[later] + lag < lags.get(earlier, math.inf):
                lags[earlier] = lags[later] + lag
                open_.append(earlier)
    return lags


@given(graphs())
@settings(max_examples=100)
def test_steps_take_at_least_what_each_resource_that_they_wait_for_is_busy(graph: list[TimedTask]) -> None:
    """A resource that the last task does not wait for may take longer: it lags ever further."""
    run, steps = engine.run(graph, 20), engine.run(graph)
    busy, lags = run.busy(), lags_of_inputs(graph)
    for task in graph:
        if task.resource and task.name in lags:
            assert run.ends[19][-1] >= (19 - lags[task.name]) * busy[task.resource] - TINY, task.name
    if graph[-1].resource:
        assert steps.period >= busy[graph[-1].resource] - TINY


@given(graphs(), st.integers(0, 11), st.floats(0, 5))
@settings(max_examples=100)
def test_a_longer_task_never_ends_anything_sooner(graph: list[TimedTask], which: int, more: float) -> None:
    tasks = list(graph)
    which %= len(tasks)
    tasks[which] = replace(tasks[which], seconds=tasks[which].seconds + more)
    before, after = engine.run(graph, 5), engine.run(tasks, 5)
    for row, later in zip(before.ends, after.ends, strict=True):
        assert all(b >= a - TINY for a, b in zip(row, later, strict=True))


def test_a_cycle_a_missing_task_and_a_negative_time_are_refused() -> None:
    a = TimedTask("a", "any", None, 1.0, (Edge("b"),))
    b = TimedTask("b", "any", None, 1.0, (Edge("a"),))
    with pytest.raises(RequestError, match="'a': expected to wait for a task before it, got 'b'"):
        engine.run([a, b])
    with pytest.raises(RequestError, match="task before it, got 'c'"):
        engine.run([TimedTask("a", "any", None, 1.0, (Edge("c", 1),))])
    for seconds in (-1.0, math.inf, math.nan, np.array([1.0, -1.0])):
        with pytest.raises(RequestError, match="at least 0, got"):
            engine.run([TimedTask("a", "any", None, seconds)])
    with pytest.raises(RequestError, match="each name once"):
        engine.run([TimedTask("a", "any", None, 1.0)] * 2)
    late = TimedTask("a", "any", None, 1.0, (Edge("b", 1),))
    assert engine.run([late, TimedTask("b", "any", None, 2.0)], 3).starts[1][0] == 2.0


# -- policies ---------------------------------------------------------------------------------------------------------

SMALL = Workload(
    "small",
    8,
    (("one", 0.010), ("two", 0.020)),
    tuple(
        Gradient(name, name, (size,), 4 * size, seconds)
        for name, size, seconds in (("two.w", 250_000, 0.030), ("two.b", 1_000, 0.0), ("one.w", 500_000, 0.040))
    ),
    tail_s=0.005,
    update_s=0.003,
    read_s=0.050,
    decode_s=0.060,
    copy_bytes=10**8,
)


def period(case: step.Case) -> float:
    """The step time of one case by the full graph."""
    return float(engine.run(step.detailed(case)).period)


def ring(size: float, ranks: int, latency: float = 10e-6, rate: float = 1e9) -> float:
    return 2 * (ranks - 1) * (latency + size / ranks / rate)


def test_the_policies_of_the_paper_are_their_equations() -> None:
    """Shi et al. 2018, equations 2 to 5; read and decode share the input workers, the copy has an engine of its own."""
    network = ClusterLinks(simulating.cluster(), 4)
    compute, update, backward = 0.030, 0.003, 0.075
    fetch, copy = 0.110, 10**8 / 1e10
    sent = [ring(tensor.bytes, 4) for tensor in SMALL.tensors]
    # wait-free backpropagation: each gradient behind its own backward and behind the gradient before
    end = 0.0
    for ready, seconds in zip((0.030, 0.030, 0.070), sent, strict=True):
        end = max(end, ready) + seconds
    wfbp = compute + max(backward, end) + update
    plain = compute + backward + sum(sent) + update
    assert period(step.Case(SMALL, network, "naive")) == pytest.approx(fetch + copy + plain)
    assert period(step.Case(SMALL, network, "caffe-mpi")) == pytest.approx(max(fetch, copy, wfbp))
    assert period(step.Case(SMALL, network, "cntk")) == pytest.approx(max(fetch, copy + plain))
    for policy in ("mxnet", "tensorflow"):
        assert period(step.Case(SMALL, network, policy)) == pytest.approx(max(fetch, copy + wfbp))
    fast = replace(SMALL, read_s=0.0, decode_s=0.0)
    assert period(step.Case(fast, network, "caffe-mpi")) == pytest.approx(wfbp)
    assert period(step.Case(fast, network, "grouped")) == pytest.approx(
        compute + backward + ring(sum(t.bytes for t in SMALL.tensors), 4) + update
    )
    assert period(step.Case(fast, ClusterLinks(simulating.cluster(), 1), "ddp")) == pytest.approx(
        compute + backward + update
    )


def test_local_sgd_bears_its_share_and_a_faster_device_and_more_images_scale() -> None:
    still = replace(SMALL, read_s=0.0, decode_s=0.0, copy_bytes=0)
    network = ClusterLinks(simulating.cluster(), 4)
    whole = ring(sum(tensor.bytes for tensor in SMALL.tensors), 4)
    assert period(step.Case(still, network, "ddp", every=8)) == pytest.approx(0.108 + whole / 8)
    alone = ClusterLinks(simulating.cluster(), 1)
    fixed = 0.08 * 0.105  # does not depend on the batch size
    assert period(step.Case(still, alone, batch=2.0)) == pytest.approx(2 * (0.105 - fixed) + fixed + 0.003)
    assert period(step.Case(still, alone, speed=2.0)) == pytest.approx(0.108 / 2)


@given(
    st.lists(st.tuples(st.floats(0, 5e-3), st.integers(1, 10**6)), min_size=1, max_size=30),
    st.floats(0, 5e-3),
    st.floats(1e4, 1e7),
    st.booleans(),
)
@settings(max_examples=150)
def test_horovods_cycles_are_what_a_loop_does(
    layers: list[tuple[float, int]], cycle: float, threshold: float, synchronous: bool
) -> None:
    """Against the loop written down as one would, a gradient at a time."""
    made = simulating.cluster(software={"synchronous": synchronous, "negotiation_us": 50.0})
    tensors = tuple(Gradient(f"t{i}", f"t{i}", (size,), 4 * size, s) for i, (s, size) in enumerate(layers))
    case = step.Case(
        Workload("any", 1, (("f", 0.01),), tensors),
        ClusterLinks(made, 4),
        "horovod",
        cycle_s=cycle,
        threshold_bytes=threshold,
    )
    negotiation = 50e-6 + 2 * 20e-6  # four ranks: two doublings
    ready = list(itertools.accumulate(seconds for seconds, _ in layers))
    tick, done, free = ready[0] + cycle / 2, 0, 0.0
    while done < len(layers):
        waiting = [i for i in range(done, len(layers)) if ready[i] <= tick]
        begin = tick + negotiation
        while waiting:
            bucket, size = [], 0
            while waiting and (not bucket or size + tensors[waiting[0]].bytes <= threshold):
                size += tensors[waiting[0]].bytes
                bucket.append(waiting.pop(0))
            free = max(free, begin) + ring(size, 4)
            done = bucket[-1] + 1
        step_on = max(tick + cycle, begin, free if synchronous else 0.0)
        if done < len(layers):
            idle = max(0.0, np.ceil((ready[done] - step_on) / max(cycle, 1e-9)))
            tick = max(step_on + idle * max(cycle, 1e-9), ready[done])
    assert period(case) == pytest.approx(0.01 + max(free, ready[-1]), rel=1e-6, abs=1e-8)


@given(
    st.lists(st.tuples(st.floats(0, 5e-3), st.integers(1, 10**6)), min_size=1, max_size=9),
    st.floats(0, 3000),
    st.floats(100, 1e5),
)
@settings(max_examples=100)
def test_merged_gradients_end_as_early_as_any_choice_of_buckets(
    layers: list[tuple[float, int]], latency_us: float, mbit_per_s: float
) -> None:
    tensors = tuple(Gradient(f"t{i}", f"t{i}", (size,), 4 * size, s) for i, (s, size) in enumerate(layers))
    network = ClusterLinks(simulating.cluster(latency_us, mbit_per_s), 4)
    workload = Workload("any", 1, (("f", 0.01),), tensors)
    found = period(step.Case(workload, network, "mg-wfbp"))
    ready = list(itertools.accumulate(seconds for seconds, _ in layers))
    best = np.inf
    for cuts in itertools.product((False, True), repeat=len(layers) - 1):
        end, size = 0.0, 0
        for i, tensor in enumerate(tensors):
            size += tensor.bytes
            if i == len(layers) - 1 or cuts[i]:
                end = max(end, ready[i]) + ring(size, 4, 1e-6 * latency_us, 1.25e5 * mbit_per_s)
                size = 0
        best = min(best, end)
    assert found == pytest.approx(0.01 + best, rel=1e-9)


CASES = st.builds(
    lambda policy, method, ranks, threshold, cycle, bucket, every, batch, speed, slow: {
        "policy": policy,
        "compression": CompressionSetting(method=method, ratio=0.05, rank=2),
        "ranks": ranks,
        "threshold_bytes": threshold,
        "cycle_s": cycle,
        "bucket_bytes": bucket,
        "every": every,
        "batch": batch,
        "speed": speed,
        "slow": slow,
    },
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(sorted(METHODS)),
    st.sampled_from([2, 3, 4, 8, 16, 60, 512]),
    st.floats(0, 1e7),
    st.floats(0, 0.02),
    st.floats(1, 1e7),
    st.sampled_from([1, 4]),
    st.floats(0.1, 4),
    st.floats(0.2, 5),
    st.floats(1, 2),
)
TWO_LEVELS = {
    "ranks_per_host": 4,
    "device": {"name": "none", "memory_bytes_per_s": 1e9, "launch_us": 20.0},
    "levels": [
        {
            "name": "near",
            "ranks": 4,
            "pieces": [
                {"from_bytes": 0, "latency_us": 5.0, "mbit_per_s": 1e4},
                {"from_bytes": 5000, "latency_us": 9.0, "mbit_per_s": 8e4},
            ],
        },
        {"name": "far", "pieces": [{"from_bytes": 0, "latency_us": 50.0, "mbit_per_s": 1e4}]},
    ],
    "software": {"algorithms": ["ring", "tree", "halving-doubling", "hierarchical"], "reduction_bytes_per_s": 1e10},
}
NETWORKS = {n: ClusterLinks(simulating.cluster(**TWO_LEVELS), n) for n in (2, 3, 4, 8, 16, 60, 512)}
SMALL_NET = simulating.workload("resnet20", 0.05, 10, update_s=0.001, serial_s=0.002, read_s=0.01, copy_bytes=10**6)


def made(values: dict[str, Any], **more: Any) -> step.Case:
    values = values | more
    return step.Case(SMALL_NET, NETWORKS[values.pop("ranks")], **values)


@given(st.lists(CASES, min_size=1, max_size=5))
@settings(max_examples=60)
def test_the_lean_graph_of_many_cases_is_the_full_graph_of_each(drawn: list[dict[str, Any]]) -> None:
    cases = [made(values, policy=drawn[0]["policy"], every=drawn[0]["every"]) for values in drawn]
    for case, seconds in zip(cases, step.periods(cases), strict=True):
        schedule = engine.run(step.detailed(case))
        assert seconds == pytest.approx(schedule.period, rel=1e-9)
        assert max(schedule.busy().values()) - TINY <= seconds <= sum(task.seconds for task in schedule.tasks) + TINY


def test_an_unknown_policy_is_told() -> None:
    with pytest.raises(RequestError, match="did you mean 'horovod'"):
        policies.named("horovd")
