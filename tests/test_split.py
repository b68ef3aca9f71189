"""`split: auto`: where a chain of blocks is cut, exactly."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest

from hvdkit.recipe.communication import Parallel
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
