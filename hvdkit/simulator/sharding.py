"""ZeRO's stages (Rajbhandari et al. 2020): what a rank keeps of the model's states, and what it sends for them.

With Ψ parameters over N ranks, stage `optimizer` (ZeRO-1) keeps 1/N of the optimizer's slots and of fp32 masters on a
rank, `gradients` (ZeRO-2) 1/N of the gradients too, and `parameters` (ZeRO-3) 1/N of everything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import get_args

from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.results.memory import Stage

STAGES: tuple[Stage, ...] = get_args(Stage)  # each shards what the one before it does, and more


@dataclass(frozen=True)
class States:
    """Bytes of the model's states: for each parameter, or of a rank.

    `masters` are fp32 copies of parameters that are themselves in half precision; hvdkit's are in fp32 and have none.
    """

    parameters: float
    gradients: float
    optimizer: float
    masters: float = 0.0

    def scaled(self, factor: float) -> States:
        """So many times as much of each."""
        return States(*(factor * value for value in astuple(self)))

    @property
    def total(self) -> float:
        """All of them."""
        return float(sum(astuple(self)))


NO_STATES = States(0, 0, 0)


def supported(framework: str) -> tuple[Stage, ...]:
    """The stages that a framework trains with; those of any framework for an unknown one."""
    able = CAPABILITIES.get(framework) or frozenset[str]().union(*CAPABILITIES.values())
    return tuple(stage for stage in STAGES if stage in ("none", "optimizer") or f"shard-{stage}" in able)


def held(states: States, parameters: int, ranks: int, stage: Stage) -> States:
    """What the rank with the most keeps of a model of so many parameters; `states` are of one parameter.

    Shares are equal to one parameter. Section 5 of the paper: with `states` = 2 + 2 + 8 + 4 bytes (mixed precision,
    Adam), 16Ψ, 4Ψ + 12Ψ/N, 2Ψ + 14Ψ/N and 16Ψ/N.
    """
    level, mine = STAGES.index(stage), -(-parameters // ranks)
    return States(
        parameters=states.parameters * (mine if level >= 3 else parameters),
        gradients=states.gradients * (mine if level >= 2 else parameters),
        optimizer=states.optimizer * (mine if level >= 1 else parameters),
        masters=states.masters * (mine if level >= 1 else parameters),
    )


def held_of(states: States, shapes: Iterable[Sequence[int]], ranks: int, stage: Stage) -> States:
    """The same of a model whose parameters have these shapes, and whose states are `states` without sharding."""
    count = sum(map(math.prod, shapes)) or 1
    return held(states.scaled(1 / count), count, ranks, stage)


def values_sent(parameters: int, ranks: int, stage: Stage, accumulate: int = 1, once: int = 0) -> float:
    """How many values a rank sends in a step: 2Ψ for an allreduce, or a reduce-scatter and an allgather; 3Ψ for stage
    `parameters`, which gathers in forward and again in backward. Section 7; times (N - 1)/N, which is exact for rings.

    Where gradients are sharded, those of each of the `accumulate` batches of a step are sent; stage `parameters` also
    gathers for each batch, but `once` of the parameters not again in backward.
    """
    if stage == "parameters":
        values = accumulate * (3 * parameters - once)
    else:
        values = (accumulate + 1 if stage == "gradients" else 2) * parameters
    return values * (ranks - 1) / ranks
