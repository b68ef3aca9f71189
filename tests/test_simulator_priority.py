"""The policy `priority` of the simulator: closed forms of chains of equal layers, and what no order can do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdkit.core.order import pieces, units
from hvdkit.simulator import engine, step
from hvdkit.simulator.costs import ClusterLinks
from hvdkit.simulator.priority import first_needed_first
from hvdkit.simulator.workload import Gradient, Workload
from tests import simulating

pytestmark = pytest.mark.check

TINY = 1e-9
BYTES = 4 * 10**6  # of a layer's gradient
SEND = 2 * 3 / 4 * BYTES / 1e9  # by a ring of four at 1 GB/s, without latency


def chain(layers: int, forward: float, backward: float, size: int = BYTES, **more: Any) -> Workload:
    """Layers that are all alike."""
    names = [f"layer{i}" for i in range(layers)]
    tensors = tuple(Gradient(name, name, (size // 4,), size, backward) for name in reversed(names))
    return Workload("chain", 1, tuple((name, forward) for name in names), tensors, **more)


def period(work: Workload, policy: str, piece: float = BYTES, **links: float) -> float:
    network = ClusterLinks(simulating.cluster(**({"latency_us": 0.0} | links)), 4)
    return step.period(step.Case(work, network, policy, piece_bytes=piece))


@pytest.mark.parametrize("layers", [2, 3, 10])
def test_whole_layers_hide_all_forwards_but_two(layers: int) -> None:
    """A network that is never idle once the last layer's gradient is there, and sends it whole before all others.

    It then sends layers 1 to n - 1. The last of these is there at b + n s, from the start of backward; its forward and
    that of the last layer follow. In the order of backward, all n forwards follow.
    """
    backward, forward = SEND / (2 * layers), SEND / 2
    work = chain(layers, forward, backward)
    assert period(work, "priority") == pytest.approx(backward + layers * SEND + 2 * forward)
    assert period(work, "caffe-mpi") == pytest.approx(backward + layers * SEND + layers * forward)


@pytest.mark.parametrize("number", [4, 40])
def test_in_pieces_all_forwards_but_one_are_hidden(number: int) -> None:
    """In pieces short enough, the last layer's gradient is overtaken before it is whole, and ends the step."""
    layers, backward, forward = 10, SEND / number, SEND / 2
    found = period(chain(layers, forward, backward), "priority", BYTES / number)
    assert found == pytest.approx(backward + layers * SEND + forward)


def test_what_backward_hides_anyway_gains_nothing() -> None:
    work = chain(6, SEND, 2 * SEND, update_s=0.003)
    wanted = 6 * SEND + 6 * 2 * SEND + SEND + 0.003
    assert period(work, "priority") == pytest.approx(wanted)
    assert period(work, "caffe-mpi") == pytest.approx(wanted)


def test_pieces_pay_for_their_latency() -> None:
    """Each piece is a ring of its own, with six messages one after the other."""
    work = chain(10, SEND / 2, SEND / 40)
    latency = 6 * 100e-6
    found = period(work, "priority", BYTES / 40, latency_us=100.0)
    assert found == pytest.approx(SEND / 40 + 10 * (SEND + 40 * latency) + SEND / 2)


def test_small_layers_are_sent_together_and_later_batches_wait_for_none() -> None:
    """One unit of ten layers: nothing but the first forward waits, for all of them, as one ring."""
    work = chain(10, 0.001, 0.002, BYTES // 10, earlier_s=0.5)
    assert period(work, "priority") == pytest.approx(10 * 0.003 + 0.5 + SEND)
    names = [task.name for task in step.detailed(step.Case(work, ClusterLinks(simulating.cluster(), 4), "priority"))]
    assert names.index("forward") < names.index("earlier batches") < names.index("backward layer9")


@given(st.lists(st.integers(1, 3 * 10**6), min_size=1, max_size=30), st.floats(1, 4e6))
@settings(max_examples=100)
def test_units_are_all_gradients_in_their_order(sizes: list[int], piece: float) -> None:
    found = units(sizes, piece)
    assert list(itertools.chain(*found)) == list(range(len(sizes)))
    held = [sum(sizes[i] for i in unit) for unit in found]
    assert all(size >= piece for size in held[:-1])
    for unit, size in zip(found, held, strict=True):
        assert size - sizes[unit[-1]] < piece and pieces(size, piece) >= 1


UNITS = st.lists(
    st.tuples(st.integers(0, 20), st.integers(1, 4), st.sampled_from([0.5, 1.0, 3.0])), min_size=1, max_size=6
)


@given(UNITS)
@settings(max_examples=200)
def test_no_piece_waits_for_a_later_layers_and_the_network_never_without_cause(
    drawn: list[tuple[int, int, float]],
) -> None:
    """Every piece is sent once; what is sent is the first of what is ready, and there is no pause while one is."""
    ready, numbers, seconds = ([row[i] for row in drawn] for i in range(3))
    order = first_needed_first(ready, numbers, seconds)
    assert sorted(order) == [(unit, piece) for unit, count in enumerate(numbers) for piece in range(count)]
    now, left = 0.0, list(numbers)
    for unit, _ in order:
        open_ = [other for other, count in enumerate(left) if count]
        now = max(now, min(ready[other] for other in open_))
        assert unit == min(other for other in open_ if ready[other] <= now)
        left[unit] -= 1
        now += seconds[unit]


def test_a_layer_begins_with_its_own_update_while_others_are_sent() -> None:
    """What the picture of a step shows: the first layer computes before the last layer's gradient has come."""
    case = step.Case(chain(5, SEND, SEND / 10), ClusterLinks(simulating.cluster(), 4), "priority", piece_bytes=BYTES)
    spans = {span.task.name: span for span in engine.run(step.detailed(case), 5).spans()}
    before = {span.task.name: span for span in engine.run(step.detailed(case), 5).spans(-2)}
    assert spans["forward layer0"].start >= before["allreduce layer0 1/1"].end
    assert spans["forward layer0"].end <= before["allreduce layer3 1/1"].end
    assert spans["forward layer3"].start >= before["allreduce layer3 1/1"].end - TINY
