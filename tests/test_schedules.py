"""Schedules of a pipeline: who computes what when, and who waits for whom, without ranks."""

from __future__ import annotations

from collections import Counter, deque

import pytest

from hvdkit.core.schedules import SCHEDULES, Action, actions, alive, bubble

pytestmark = pytest.mark.check

SIZES = [(2, 2), (2, 7), (3, 3), (4, 4), (4, 9), (8, 8), (8, 3), (2, 1), (1, 5)]  # stages, microbatches
CASES = [(schedule, *sizes, 1) for schedule in ("gpipe", "1f1b") for sizes in SIZES]
CASES += [("interleaved", p, m * p, v) for p in range(1, 9) for m in (1, 3) for v in (2, 3, 4)]
BACKWARD = 2.0  # times a forward pass


def simulated(listed: list[list[Action]]) -> list[list[tuple[Action, float, float]]]:
    """When each stage computes: (pass, begin, end). Messages take no time. Raises AssertionError where stages wait for
    ever, or a message has another receiver's order."""
    clocks, at = [0.0] * len(listed), [0] * len(listed)
    sent: dict[tuple[int, int, str], deque[tuple[int, float]]] = {}
    stages = len(listed)
    spans: list[list[tuple[Action, float, float]]] = [[] for _ in listed]
    moved = True
    while moved:
        moved = False
        for stage, of_stage in enumerate(listed):
            while at[stage] < len(of_stage):
                action = of_stage[at[stage]]
                way, _, what = action.kind.partition(" ")
                if way == "receive":
                    waiting = sent.get((stage, action.chunk, what))
                    if not waiting:
                        break
                    number, since = waiting.popleft()
                    assert number == action.microbatch, "one stage sends in another order than the next receives"
                    clocks[stage] = max(clocks[stage], since)
                elif way == "send":
                    chunk, to = divmod(action.chunk * stages + stage + (1 if what == "activation" else -1), stages)
                    sent.setdefault((to, chunk, what), deque()).append((action.microbatch, clocks[stage]))
                else:
                    end = clocks[stage] + (1.0 if way == "forward" else BACKWARD)
                    spans[stage].append((action, clocks[stage], end))
                    clocks[stage] = end
                at[stage] += 1
                moved = True
    assert at == [len(each) for each in listed], "stages wait for each other for ever"
    assert not any(sent.values()), "a message has no receiver"
    return spans


def of(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> list[list[Action]]:
    return [actions(schedule, stage, stages, microbatches, chunks) for stage in range(stages)]


def test_each_schedule_is_tested() -> None:
    assert {schedule for schedule, *_ in CASES} == set(SCHEDULES)


@pytest.mark.parametrize(("schedule", "stages", "microbatches", "chunks"), CASES)
def test_each_microbatch_goes_forward_and_back_once_through_each_chunk(
    schedule: str, stages: int, microbatches: int, chunks: int
) -> None:
    listed, last = of(schedule, stages, microbatches, chunks), stages * chunks - 1
    every = range(microbatches)
    for stage, of_stage in enumerate(listed):
        wanted = Counter[Action]()
        for chunk in range(chunks):
            place = chunk * stages + stage
            kinds = ["forward", "backward"]
            kinds += ["receive activation", "send gradient"] if place else []
            kinds += ["send activation", "receive gradient"] if place < last else []
            wanted += Counter(Action(kind, number, chunk) for kind in kinds for number in every)  # type: ignore[arg-type]
        assert Counter(of_stage) == wanted
    spans = simulated(listed)
    ends = [{action: end for action, _, end in of_stage} for of_stage in spans]
    begins = [{action: begin for action, begin, _ in of_stage} for of_stage in spans]
    for number in every:
        for place in range(last + 1):
            (chunk, stage), (chunk_before, before) = divmod(place, stages), divmod(place - 1, stages)
            forward, backward = Action("forward", number, chunk), Action("backward", number, chunk)
            assert ends[stage][forward] <= begins[stage][backward]
            if place:
                assert ends[before][Action("forward", number, chunk_before)] <= begins[stage][forward]
                assert ends[stage][backward] <= begins[before][Action("backward", number, chunk_before)]


@pytest.mark.parametrize(("schedule", "stages", "microbatches", "chunks"), CASES)
def test_gradients_are_added_up_in_the_order_of_microbatches(
    schedule: str, stages: int, microbatches: int, chunks: int
) -> None:
    """So a pipeline rounds as accumulation does, and running statistics are those of accumulation."""
    for of_stage in of(schedule, stages, microbatches, chunks):
        for chunk in range(chunks):
            for kind in ("forward", "backward"):
                order = [action.microbatch for action in of_stage if (action.kind, action.chunk) == (kind, chunk)]
                assert order == list(range(microbatches))


@pytest.mark.parametrize(("schedule", "stages", "microbatches", "chunks"), CASES)
def test_the_bubble_is_that_of_the_formula(schedule: str, stages: int, microbatches: int, chunks: int) -> None:
    spans = simulated(of(schedule, stages, microbatches, chunks))
    step = max(end for of_stage in spans for _, _, end in of_stage)
    for of_stage in spans:
        busy = sum(end - begin for _, begin, end in of_stage)
        assert 1 - busy / step == pytest.approx(bubble(stages, microbatches, chunks))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_memory_is_bounded_by_the_stages_where_passes_alternate(stages: int, microbatches: int) -> None:
    assert [alive(each) for each in of("gpipe", stages, microbatches)] == [microbatches] * stages
    wanted = [min(stages - stage, microbatches) for stage in range(stages)]
    assert [alive(each) for each in of("1f1b", stages, microbatches)] == wanted
    for chunks in (2, 3):
        total = chunks * microbatches * stages  # passes of a turn's multiple
        wanted = [min(2 * (stages - 1 - stage) + (chunks - 1) * stages + 1, total) for stage in range(stages)]
        assert [alive(each) for each in of("interleaved", stages, microbatches * stages, chunks)] == wanted


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
