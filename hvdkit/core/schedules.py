"""Schedules of a pipeline as data: what each stage does, in which order. Pure; `core/pipeline.py` carries them out.

A schedule is one function: it orders a stage's forward and backward passes, of which each microbatch has one. What the
stages send each other follows from that. A send waits for nobody, a receive waits for the message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

Pass = Literal["forward", "backward"]
Kind = Literal[Pass, "send activation", "send gradient", "receive activation", "receive gradient"]


class Action(NamedTuple):
    """What a stage does for the microbatch of this number, counted from 0."""

    kind: Kind
    microbatch: int


def gpipe(ahead: int, microbatches: int) -> list[tuple[Pass, int]]:
    """All forward passes, then all backward ones (Huang et al. 2019), so that all microbatches are alive at once.

    Gradients are computed in the order of the microbatches, as without a pipeline.
    """
    passes: tuple[Pass, Pass] = ("forward", "backward")
    return [(each, number) for each in passes for number in range(microbatches)]


def one_forward_one_backward(ahead: int, microbatches: int) -> list[tuple[Pass, int]]:
    """A backward pass after each forward pass, as soon as it can be (PipeDream-Flush, Narayanan et al. 2021).

    It takes as long as `gpipe`, and a stage has at most `ahead` + 1 microbatches alive.
    """
    first = min(ahead, microbatches)
    passes: list[tuple[Pass, int]] = [("forward", number) for number in range(first)]
    for number in range(microbatches):
        passes += [("forward", number + first)] if number + first < microbatches else []
        passes.append(("backward", number))
    return passes


# Name in a recipe -> a stage's passes, by the number of stages that are `ahead` of it, and of microbatches.
SCHEDULES: dict[str, Callable[[int, int], list[tuple[Pass, int]]]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}


def actions(schedule: str, stage: int, stages: int, microbatches: int) -> list[Action]:
    """What a stage, counted from 0, does in one step."""
    is_first, is_last = stage == 0, stage == stages - 1
    listed: list[Action] = []
    for kind, number in SCHEDULES[schedule](stages - 1 - stage, microbatches):
        if kind == "forward":
            before = [] if is_first else [Action("receive activation", number)]
            after = [] if is_last else [Action("send activation", number)]
        else:
            before = [] if is_last else [Action("receive gradient", number)]
            after = [] if is_first else [Action("send gradient", number)]
        listed += [*before, Action(kind, number), *after]
    return listed


def alive(listed: Sequence[Action]) -> int:
    """The most microbatches of a stage that have gone forward and not yet back, whose activations it keeps."""
    most = now = 0
    for action in listed:
        now += {"forward": 1, "backward": -1}.get(action.kind, 0)
        most = max(most, now)
    return most


def bubble(stages: int, microbatches: int) -> float:
    """The share of a step in which a stage waits, if all passes take equally long: (p - 1) / (m + p - 1)."""
    return (stages - 1) / (microbatches + stages - 1)
