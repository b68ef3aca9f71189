"""`split: auto`: where a chain of blocks is cut, exactly."""

from __future__ import annotations

from itertools import combinations, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdkit import tasks
from hvdkit.commands import checked_run
from hvdkit.core import cuts
from hvdkit.core.cuts import finished
from hvdkit.core.schedules import actions, alive
from hvdkit.errors import RequestError
from hvdkit.recipe import registry, schema
from hvdkit.recipe.communication import Parallel
from hvdkit.runtimes import machine
from hvdkit.simulator import memory
from hvdkit.tasks import gpt, resnet
from hvdkit.tasks.parts import balanced
from hvdkit.tasks.task import parameter_count

pytestmark = pytest.mark.check


def cut(work: list[int], split: list[int]) -> tuple[int, int]:
    """The most work of a run, and the sum of squares."""
    ends = np.cumsum([0, *split])
    sums = [sum(work[start:stop]) for start, stop in pairwise(ends)]
    return max(sums), sum(each * each for each in sums)


def test_a_chain_is_cut_as_well_as_by_the_best_of_all_cuts() -> None:
    random = np.random.default_rng(1)
    for _ in range(300):
        count = int(random.integers(1, 10))
        runs = int(random.integers(1, count + 1))
        work = random.integers(0, 10 ** int(random.integers(1, 7)), count).tolist()
        every = (np.diff([0, *ends, count]).tolist() for ends in combinations(range(1, count), runs - 1))
        split = balanced(work, runs)
        assert len(split) == runs and sum(split) == count and min(split) > 0
        assert cut(work, split) == min(cut(work, own) for own in every), (work, runs)


def test_equal_blocks_are_cut_evenly_and_long_chains_at_once() -> None:
    assert balanced([1] * 8, 3) in ([3, 3, 2], [3, 2, 3], [2, 3, 3])
    assert balanced([1] * 400, 8) == [50] * 8


@pytest.mark.parametrize("name", resnet.NAMES)
def test_a_resnets_work_is_that_of_its_layers(name: str) -> None:
    table = resnet.architecture(name, 10)
    assert list(table.work_by_block()) == [block.name for block in table.blocks]
    assert sum(table.work_by_block().values()) == table.multiply_adds(table.usual_side)


def test_the_output_layer_counts() -> None:
    """GPT-2's is as much work as five and a half blocks."""
    table, axes = gpt.published("gpt2"), Parallel(pipeline=4)
    work = list(table.work_by_block().values())
    assert work[-1] > 5 * work[1] and sum(work) == sum(table.work_by_layer().values()) + table.width
    stages = [table.staged(axes, number) for number in range(4)]
    blocks = [own.here.stop - own.here.start for own in stages]
    assert blocks[-1] == 1 and sum(blocks) == 12
    tied = table.vocabulary * table.width  # the table of tokens is at both ends
    assert sum(map(parameter_count, stages)) == parameter_count(table) + tied


def every_cut(count: int, runs: int) -> list[list[int]]:
    return [
        [stop - start for start, stop in pairwise((0, *ends, count))]
        for ends in combinations(range(1, count), runs - 1)
    ]


def seconds(work: list[float], split: list[int], axes: Parallel, microbatches: int) -> float:
    """A step by its schedule, backward twice as long as forward."""
    ends = np.cumsum([0, *split])
    passes = [sum(work[start:stop]) for start, stop in pairwise(ends)]
    forward = [passes[stage :: axes.pipeline] for stage in range(axes.pipeline)]
    return max(finished(axes.schedule, microbatches, forward, [[2 * one for one in of] for of in forward]))


def most_bytes(state: list[float], values: list[float], split: list[int], axes: Parallel, microbatches: int) -> float:
    """What the stage with the most keeps."""
    ends, stages = np.cumsum([0, *split]), range(axes.pipeline)
    kept = [0.0] * axes.pipeline
    for run, (start, stop) in enumerate(pairwise(ends)):
        stage, chunk = run % axes.pipeline, run // axes.pipeline
        at_once = alive(
            actions(axes.schedule, stage, axes.pipeline, microbatches, axes.chunks),
            [int(number == chunk) for number in range(axes.chunks)],
        )
        kept[stage] += sum(state[start:stop]) + at_once * sum(values[start:stop])
    return max(kept[stage] for stage in stages)


SCHEDULES: list[tuple[int, int, str]] = [
    (2, 1, "1f1b"), (3, 1, "1f1b"), (4, 1, "gpipe"), (2, 2, "interleaved"), (3, 2, "interleaved"), (2, 3, "interleaved")
]  # fmt: skip


def axes_of(stages: int, chunks: int, schedule: str, optimize: str = "speed") -> Parallel:
    return Parallel.model_validate({"pipeline": stages, "chunks": chunks, "schedule": schedule, "optimize": optimize})


@pytest.mark.parametrize("stages, chunks, schedule", SCHEDULES)
def test_random_chains_take_a_step_within_a_hundredth_of_the_best_of_all_cuts(
    stages: int, chunks: int, schedule: str
) -> None:
    random = np.random.default_rng(stages + 10 * chunks)
    for _ in range(12):
        axes, microbatches = axes_of(stages, chunks, schedule), stages * int(random.integers(1, 5))
        count = int(random.integers(axes.runs, 11))
        work = random.integers(1, 1000, count).tolist()
        split = cuts.chosen(axes, work, microbatches)
        best = min(seconds(work, cut, axes, microbatches) for cut in every_cut(count, axes.runs))
        assert seconds(work, split, axes, microbatches) <= 1.01 * best, (work, split)


def test_long_chains_are_cut_as_well_without_trying_every_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuts, "comb", lambda count, runs: 10**9)
    random = np.random.default_rng(3)
    for stages, schedule in ((2, "1f1b"), (3, "1f1b"), (4, "1f1b"), (3, "gpipe")):
        for _ in range(10):
            axes, count = axes_of(stages, 1, schedule), int(random.integers(stages, 12))
            work = random.integers(1, 1000, count).tolist()
            best = min(seconds(work, cut, axes, 8) for cut in every_cut(count, stages))
            assert seconds(work, cuts.chosen(axes, work, 8), axes, 8) <= 1.01 * best


@pytest.mark.parametrize("optimize", ["speed", "memory"])
@pytest.mark.parametrize(
    "stages, chunks, schedule", [(2, 1, "1f1b"), (3, 1, "1f1b"), (3, 1, "gpipe"), (2, 2, "interleaved")]
)
def test_a_stage_keeps_no_more_than_there_is_room_for(stages: int, chunks: int, schedule: str, optimize: str) -> None:
    """As the best of all cuts: the fastest of those that fit, or the one that needs the least."""
    random = np.random.default_rng(7)
    for _ in range(10):
        axes, count = axes_of(stages, chunks, schedule, optimize), int(random.integers(stages * chunks, 10))
        work, state, values = (random.integers(1, 1000, count).tolist() for _ in range(3))
        every = every_cut(count, axes.runs)
        needs = sorted(most_bytes(state, values, cut, axes, 2 * stages) for cut in every)
        room = needs[len(needs) // 3]
        split = cuts.chosen(axes, work, 2 * stages, (state, values), room)
        needed = most_bytes(state, values, split, axes, 2 * stages)
        if optimize == "memory":
            assert needed == pytest.approx(needs[0])
            continue
        fitting = [cut for cut in every if most_bytes(state, values, cut, axes, 2 * stages) <= room]
        best = min(seconds(work, cut, axes, 2 * stages) for cut in fitting)
        assert needed <= room and seconds(work, split, axes, 2 * stages) <= 1.01 * best


@pytest.mark.parametrize(
    "recipe, keys",
    [
        ("resnet20-digits", ["batch_size=32"]),
        ("resnet20-digits", ["model.name=resnet50", "batch_size=32"]),
        ("gpt-tiny", ["model={name: gpt2}", "batch_size=16"]),
    ],
)
@pytest.mark.parametrize(
    "axes", [{"pipeline": 2}, {"pipeline": 4}, {"pipeline": 2, "chunks": 2, "schedule": "interleaved"}]
)
def test_models_take_a_step_within_a_hundredth_of_the_best_of_all_cuts(
    recipe: str, keys: list[str], axes: dict[str, Any]
) -> None:
    texts = [f"parallel.{key}={value}" for key, value in axes.items()]
    asked = schema.load(registry.locate(Path(recipe)), [*keys, *texts])
    table = gpt.published("gpt2") if "gpt2" in str(keys) else resnet.architecture(asked.model.name, 10)
    work = cuts.costs_of(table)
    split, count = cuts.resolved(asked, table).split, cuts.passes_of(asked)
    assert split != "auto" and sum(split) == len(work)
    best = min(seconds(work, cut, asked.parallel, count) for cut in every_cut(len(work), len(split)))
    assert seconds(work, split, asked.parallel, count) <= 1.01 * best


def test_least_memory_gives_the_first_stage_fewer_blocks() -> None:
    """It keeps the most microbatches. The same numbers on all ranks, whatever computes them."""
    asked = schema.load(registry.locate(Path("resnet20-digits")), ["batch_size=64", "parallel.pipeline=3"])
    table = resnet.architecture("resnet20", 10)
    fast = cuts.resolved(asked, table)
    lean = asked.model_copy(update={"parallel": asked.parallel.model_copy(update={"optimize": "memory"})})
    least = cuts.resolved(lean, table)
    assert least == cuts.resolved(lean, table)
    state, values = cuts._kept(lean, table, len(table.blocks))
    assert isinstance(least.split, list) and isinstance(fast.split, list)
    needs = [most_bytes(state, values, split, fast, 12) for split in (least.split, fast.split)]
    assert needs[0] < needs[1]


def test_times_that_are_given_decide_about_the_cut() -> None:
    """In place of counted operations; and they say what each stage's passes take."""
    table = resnet.architecture("resnet20", 10)
    times = [9.0, *[1.0] * 8]
    axes = ["parallel.pipeline=2", "parallel.microbatches=4", f"parallel.costs={times}"]
    asked = schema.load(registry.locate(Path("resnet20-digits")), axes)
    given, counted = (
        cuts.resolved(asked, table),
        cuts.resolved(asked.model_copy(update={"parallel": axes_of(2, 1, "1f1b")}), table),
    )
    assert given.split == [1, 8] != counted.split
    assert cuts.passes_ms(given, 4) == [36.0, 32.0] and cuts.passes_ms(counted, 4) is None
    with pytest.raises(
        RequestError, match=r"parallel\.costs: expected 9 times, one of each of the model's blocks, got 2"
    ):
        table.check_parallel(asked.parallel.model_copy(update={"costs": [1.0, 2.0]}))
    for wrong in ("fast", "[]", "[1, x]", "[0]"):
        with pytest.raises(RequestError, match=r"parallel\.costs"):
            schema.load(registry.locate(Path("resnet20-digits")), [*axes[:2], f"parallel.costs={wrong}"])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_no_stage_needs_more_than_the_memory_or_it_is_refused(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all cuts: one is found wherever there is one, and the run is refused in a line where there is none."""
    keys = [f"parallel.schedule={schedule}", "parallel.pipeline=3", "parallel.microbatches=3", "batch_size=96"]
    asked = schema.load(registry.locate(Path("gpt-tiny")), [*keys, "model.width=256", "model.layers=6"])

    def most(split: list[int]) -> int:
        axes = asked.parallel.model_copy(update={"split": split})
        cut = asked.model_copy(update={"parallel": axes})
        return max(memory.parts_of_stage(cut, (64,), "pytorch", False, 1, "none", at).total for at in range(3))

    needs = sorted(map(most, every_cut(6, 3)))
    for room in (needs[0], needs[1], needs[-1]):
        split = memory.cut_within(asked, (64,), "pytorch", False, 1, room)
        assert split and most(split) <= room
    assert memory.cut_within(asked, (64,), "pytorch", False, 1, needs[0] - 1) is None
    samples: Any = SimpleNamespace(shape=(64,))
    monkeypatch.setattr(machine, "memory", lambda: 3 * needs[0])
    notes: list[str] = []
    cut, fastest = (
        cuts.resolved(one, tasks.choose(asked).architecture((64,))).split
        for one in (checked_run._cut(asked, "pytorch", 3, samples, notes), asked)
    )
    assert cut != "auto" and most(cut) == needs[0]
    assert notes == (
        [] if cut == fastest else [f"parallel.split: {cut} in place of {fastest}, so that each stage fits into memory"]
    )
    monkeypatch.setattr(machine, "memory", lambda: 3 * needs[0] - 3)
    with pytest.raises(RequestError, match=r"parallel\.split: expected a cut into 3 stages of which each fits into"):
        checked_run._cut(asked, "pytorch", 3, samples, notes)
