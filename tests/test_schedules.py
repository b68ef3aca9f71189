"""Schedules of a pipeline: who computes what when, and who waits for whom, without ranks."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from hvdkit.core.schedules import SCHEDULES, Action, actions, alive, bubble

pytestmark = pytest.mark.check

SIZES = [(2, 2), (2, 7), (3, 3), (4, 4), (4, 9), (8, 8), (8, 3), (2, 1), (1, 5)]  # stages, microbatches
BACKWARD = 2.0  # times a forward pass


def simulated(listed: list[list[Action]]) -> list[list[tuple[Action, float, float]]]:
    """When each stage computes: (pass, begin, end). Messages take no time. Raises AssertionError where stages wait for
    ever, or a message has another receiver's order."""
    clocks, at = [0.0] * len(listed), [0] * len(listed)
    sent: dict[tuple[int, str], deque[tuple[int, float]]] = {}
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in listed]
    moved = True
    while moved:
        moved = False
        for stage, of_stage in enumerate(listed):
            while at[stage] < len(of_stage):
                action = of_stage[at[stage]]
                way, _, what = action.kind.partition(" ")
                if way == "receive":
                    waiting = sent.get((stage, what))
                    if not waiting:
                        break
                    number, since = waiting.popleft()
                    assert number == action.microbatch, "one stage sends in another order than the next receives"
                    clocks[stage] = max(clocks[stage], since)
                elif way == "send":
                    to = stage + (1 if what == "activation" else -1)
                    sent.setdefault((to, what), deque()).append((action.microbatch, clocks[stage]))
                else:
                    end = clocks[stage] + (1.0 if way == "forward" else BACKWARD)
                    spans[stage].append((action, clocks[stage], end))
                    clocks[stage] = end
                at[stage] += 1
                moved = True
    assert at == [len(each) for each in listed], "stages wait for each other for ever"
    assert not any(sent.values()), "a message has no receiver"
    return spans


def of(schedule: str, stages: int, microbatches: int) -> list[list[Action]]:
    return [actions(schedule, stage, stages, microbatches) for stage in range(stages)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_each_microbatch_goes_forward_and_back_once_through_each_stage(
    schedule: str, stages: int, microbatches: int
) -> None:
    listed = of(schedule, stages, microbatches)
    every = range(microbatches)
    for stage, of_stage in enumerate(listed):
        wanted = Counter(Action(kind, number) for kind in ("forward", "backward") for number in every)
        if stage:
            wanted += Counter(
                Action(kind, number) for kind in ("receive activation", "send gradient") for number in every
            )
        if stage < stages - 1:
            wanted += Counter(
                Action(kind, number) for kind in ("send activation", "receive gradient") for number in every
            )
        assert Counter(of_stage) == wanted
    ends = [{action: end for action, _, end in spans} for spans in simulated(listed)]
    begins = [{action: begin for action, begin, _ in spans} for spans in simulated(listed)]
    for number in every:
        forward, backward = Action("forward", number), Action("backward", number)
        for stage in range(stages):
            assert ends[stage][forward] <= begins[stage][backward]
            if stage:
                assert ends[stage - 1][forward] <= begins[stage][forward]
                assert ends[stage][backward] <= begins[stage - 1][backward]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_gradients_are_added_up_in_the_order_of_microbatches(schedule: str, stages: int, microbatches: int) -> None:
    """So a pipeline rounds as accumulation does."""
    for of_stage in of(schedule, stages, microbatches):
        backward = [action.microbatch for action in of_stage if action.kind == "backward"]
        assert backward == list(range(microbatches))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_the_bubble_is_that_of_the_formula(schedule: str, stages: int, microbatches: int) -> None:
    spans = simulated(of(schedule, stages, microbatches))
    step = max(end for of_stage in spans for _, _, end in of_stage)
    for of_stage in spans:
        busy = sum(end - begin for _, begin, end in of_stage)
        assert 1 - busy / step == pytest.approx(bubble(stages, microbatches))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_memory_is_bounded_by_the_stages_where_passes_alternate(stages: int, microbatches: int) -> None:
    assert [alive(each) for each in of("gpipe", stages, microbatches)] == [microbatches] * stages
    wanted = [min(stages - stage, microbatches) for stage in range(stages)]
    assert [alive(each) for each in of("1f1b", stages, microbatches)] == wanted


def test_a_stage_that_waits_for_what_nobody_sends_is_found() -> None:
    """The checks above would notice it."""
    listed = of("1f1b", 2, 2)
    listed[0] = [action for action in listed[0] if action != Action("send activation", 1)]
    with pytest.raises(AssertionError, match="for ever"):
        simulated(listed)
    swapped = of("gpipe", 2, 2)
    first, second = (swapped[0].index(Action("send activation", number)) for number in (0, 1))
    swapped[0][first], swapped[0][second] = swapped[0][second], swapped[0][first]
    with pytest.raises(AssertionError, match="another order"):
        simulated(swapped)
