"""Where `split: auto` cuts a pipeline's chain of blocks: by dynamic programming, then by the schedule of a step.

The least largest stage is not always the fastest: with few microbatches, or several chunks of each stage, it counts
which passes wait for which. So boundaries of the exact min–max cut are moved as long as the step, simulated by the
schedule with backward twice as long as forward, gets shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, combinations, pairwise
from math import comb, inf
from typing import TYPE_CHECKING, Literal

from hvdkit import tasks
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.schedules import Action, actions, alive
from hvdkit.core.update_rules import rule_of
from hvdkit.recipe.parallel import microbatches_of
from hvdkit.tasks.parts import balanced
from hvdkit.tasks.resnet import ResNet
from hvdkit.tasks.task import parameter_count

if TYPE_CHECKING:
    from hvdkit.recipe.communication import Parallel
    from hvdkit.recipe.schema import Recipe
    from hvdkit.tasks.task import Architecture

BACKWARD = 2  # times a forward pass: gradients of inputs, and of weights
_STEADY = 4  # times as many microbatches as stages, after which each takes as long as the one before
_ACTIONS = 200_000  # that are simulated at most to find a cut, about a fifth of a second
_SHORTER = 0.002  # the part of a step by which another cut must be better
_Aim = Literal["speed", "memory"]


def chosen(
    axes: Parallel,
    work: Sequence[float],
    microbatches: int,
    kept: tuple[Sequence[float], Sequence[float]] | None = None,
    room: float = inf,
) -> list[int]:
    """How many blocks each run of a chain has whose blocks take so much `work`, forward.

    `kept` are each block's bytes: those of its state, and of what one microbatch leaves until backward. A stage keeps
    at most `room` of them, if there is such a cut; `axes.optimize` says what is least: the time or the largest stage's
    bytes.
    """
    state, values = kept or ((0.0,) * len(work),) * 2
    return list(_chosen(axes.schedule, axes.pipeline, axes.chunks, axes.optimize, tuple(work), microbatches,
                        tuple(state), tuple(values), room))  # fmt: skip


def resolved(recipe: Recipe, table: Architecture, room: float = inf) -> Parallel:
    """The axes with the numbers of blocks that `split: auto` stands for, the same on all ranks and in every plan.

    No stage's state and activations have more than `room` bytes, if there is such a cut.
    """
    work, kept = costs_of(table), None
    if recipe.parallel.pipeline > 1 and work and (room < inf or recipe.parallel.optimize == "memory"):
        kept = _kept(recipe, table, len(work))
    return cut(recipe, work, kept, room)


def cut(
    recipe: Recipe,
    work: Sequence[float],
    kept: tuple[Sequence[float], Sequence[float]] | None = None,
    room: float = inf,
) -> Parallel:
    """The same of a chain whose blocks take so much work, or the times that the recipe has."""
    axes = recipe.parallel
    work = work if isinstance(axes.costs, str) else axes.costs
    if axes.pipeline == 1 or axes.split != "auto" or len(work) < axes.runs:
        return axes
    return axes.model_copy(update={"split": chosen(axes, work, passes_of(recipe), kept, room)})


def kept_by_stage(recipe: Recipe, table: Architecture, split: Sequence[int]) -> list[float]:
    """The bytes of each stage's state and activations, as far as a cut decides about them."""
    axes, count = recipe.parallel, len(costs_of(table))
    state, values = _kept(recipe, table, count)
    of_runs = _of_runs(axes.schedule, axes.pipeline, axes.chunks, passes_of(recipe), state, values)
    return _by_stage(split, of_runs, axes.pipeline)


def passes_ms(axes: Parallel, microbatches: int) -> list[float] | None:
    """What each stage's passes of a step take by the times of its blocks; None where these are not known."""
    if axes.pipeline == 1 or isinstance(axes.costs, str) or axes.split == "auto":
        return None
    ends = [0, *accumulate(axes.split)]
    runs = [microbatches * sum(axes.costs[start:stop]) for start, stop in pairwise(ends)]
    return [sum(runs[stage :: axes.pipeline]) for stage in range(axes.pipeline)]


def costs_of(table: Architecture) -> list[float]:
    """About the time of each block, in multiply-adds; empty where they are unknown."""
    return list(table.cost_by_block().values())


def passes_of(recipe: Recipe) -> int:
    """How many microbatches an update has."""
    return microbatches_of(recipe.parallel, recipe.batch_size) * recipe.accumulate


def _kept(recipe: Recipe, table: Architecture, count: int) -> tuple[list[float], list[float]]:
    """The bytes of each block's state, and of what a microbatch of samples of the usual shape leaves."""
    precision = PRECISIONS[recipe.precision]
    full, low = (8.0 if name == "float64" else 4.0 if name == "float32" else 2.0 for name in
                 (precision.parameters, precision.compute))  # fmt: skip
    single = recipe.parallel.model_copy(update={"pipeline": count, "chunks": 1, "split": [1] * count})
    tables = [table.staged(single, number) for number in range(count)]
    of_parameter = full * (3 + len(rule_of(recipe.optimizer).slots)) + (low if low < full else 0.0)
    states = [of_parameter * parameter_count(own) for own in tables]
    samples = recipe.batch_size // microbatches_of(recipe.parallel, recipe.batch_size)
    shape = (table.usual_side, table.usual_side, 3) if isinstance(table, ResNet) else (tasks.choose(recipe).units,)
    values = [own.activations(shape, recipe.recompute) for own in tables]
    return states, [samples * ((own.compute + own.scores) * low + own.full * full) if own else 0.0 for own in values]


@lru_cache(maxsize=256)
def _chosen(
    schedule: str, stages: int, chunks: int, aim: _Aim, work: tuple[float, ...], microbatches: int,
    state: tuple[float, ...], values: tuple[float, ...], room: float,
) -> tuple[int, ...]:  # fmt: skip
    runs, count = stages * chunks, len(work)
    of_runs = _of_runs(schedule, stages, chunks, microbatches, state, values)

    def score(split: Sequence[int]) -> tuple[float, float]:
        passes = [sum(work[start:stop]) for start, stop in pairwise((0, *accumulate(split)))]
        most = max(_by_stage(split, of_runs, stages))
        forward = [passes[stage::stages] for stage in range(stages)]
        backward = [[BACKWARD * seconds for seconds in of] for of in forward]
        step = max(finished(schedule, microbatches, forward, backward))
        return (most, step) if aim == "memory" else (max(0.0, most - room), step)

    best = balanced(work, runs)
    least, tried = score(best), list[list[int]]()
    most_tries = _ACTIONS // (6 * runs * min(microbatches, (_STEADY + 2) * stages))
    if comb(count - 1, runs - 1) <= most_tries:
        tried = [[b - a for a, b in pairwise((0, *ends, count))] for ends in combinations(range(1, count), runs - 1)]
    elif aim == "memory" or room < inf:
        tried = [balanced(work, runs, of_runs, 0.0 if aim == "memory" else room / chunks)]
    for split in tried:
        if _better(own := score(split), least):
            best, least = split, own
    moves = _moved(best)
    for _ in range(most_tries):
        if not (split := next(moves, [])):
            break
        if _better(own := score(split), least):
            best, least, moves = split, own, _moved(split)
    return tuple(best)


def _of_runs(
    schedule: str, stages: int, chunks: int, microbatches: int, state: Sequence[float], values: Sequence[float]
) -> list[list[float]]:
    """What each run would keep of each block, whose `state` and `values` of a microbatch have so many bytes."""
    alive_at = [
        [alive(actions(schedule, stage, stages, microbatches, chunks), [int(c == chunk) for c in range(chunks)])
         for chunk in range(chunks)]
        for stage in range(stages)
    ]  # fmt: skip
    return [
        [own + alive_at[run % stages][run // stages] * passed for own, passed in zip(state, values, strict=True)]
        for run in range(stages * chunks)
    ]


def _by_stage(split: Sequence[int], of_runs: Sequence[Sequence[float]], stages: int) -> list[float]:
    """What each stage keeps."""
    ends = pairwise((0, *accumulate(split)))
    kept = [sum(of[start:stop]) for of, (start, stop) in zip(of_runs, ends, strict=True)]
    return [sum(kept[stage::stages]) for stage in range(stages)]


def _better(score: tuple[float, float], best: tuple[float, float]) -> bool:
    """Whether the first figure is less, or it is the same and the step is shorter by more than rounding."""
    return score[0] < best[0] * (1 - 1e-9) or (score[0] <= best[0] and score[1] < best[1] * (1 - _SHORTER))


def _moved(split: Sequence[int]) -> Iterator[list[int]]:
    """The cuts in which a run gives a block to another one, so that those between them move along."""
    for giver in range(len(split)):
        for taker in range(len(split)):
            if giver != taker and split[giver] > 1:
                moved = list(split)
                moved[giver], moved[taker] = moved[giver] - 1, moved[taker] + 1
                yield moved


def finished(
    schedule: str,
    microbatches: int,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    hop_s: float = 0.0,
) -> list[float]:
    """When each stage has finished its passes, whose seconds are given by stage and chunk.

    Of many microbatches only the first are simulated, as then each takes as long as the one before it.
    """
    stages = len(forward)
    few = _STEADY * stages + microbatches % stages
    if microbatches <= few + stages:
        return simulated(schedule, microbatches, forward, backward, hop_s)
    ends, later = (simulated(schedule, count, forward, backward, hop_s) for count in (few, few + stages))
    rounds = (microbatches - few) / stages
    return [end + rounds * (after - end) for end, after in zip(ends, later, strict=True)]


def simulated(
    schedule: str,
    microbatches: int,
    forward: Sequence[Sequence[float]],
    backward: Sequence[Sequence[float]],
    hop_s: float = 0.0,
    on_pass: Callable[[int, Action, float, float], None] | None = None,
) -> list[float]:
    """As `finished`, of all microbatches. `on_pass` gets each pass's stage, action, begin and end."""
    stages, chunks = len(forward), len(forward[0])
    listed = [actions(schedule, stage, stages, microbatches, chunks) for stage in range(stages)]
    clocks, at = [0.0] * stages, [0] * stages
    arrived: dict[tuple[int, str, int, int], float] = {}  # by receiver, what, microbatch, chunk
    links: dict[tuple[int, int], float] = {}  # from a stage to another: when the link is free
    waits: dict[int, tuple[int, str, int, int]] = {}
    ready = [*range(stages)]
    while ready:
        stage = ready.pop()
        of_stage, clock, index = listed[stage], clocks[stage], at[stage]
        while index < len(of_stage):
            kind, number, chunk = action = of_stage[index]
            if kind in ("forward", "backward"):
                begin, clock = clock, clock + (forward if kind == "forward" else backward)[stage][chunk]
                if on_pass:
                    on_pass(stage, action, begin, clock)
            else:
                way, _, what = kind.partition(" ")
                if way == "receive":
                    message = (stage, what, number, chunk)
                    if message not in arrived:
                        waits[stage] = message
                        break
                    clock = max(clock, arrived.pop(message))
                else:
                    run = chunk * stages + stage + (1 if what == "activation" else -1)
                    target = run % stages
                    message = (target, what, number, run // stages)
                    free = max(clock, links.get((stage, target), 0.0)) + hop_s
                    arrived[message] = links[stage, target] = free
                    if waits.get(target) == message:
                        del waits[target]
                        ready.append(target)
            index += 1
        clocks[stage], at[stage] = clock, index
    return clocks
