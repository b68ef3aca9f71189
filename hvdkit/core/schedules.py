"""Schedules of a pipeline as data: what each stage does, in which order. Pure; `core/pipeline.py` carries them out.

A schedule is one function: it orders a stage's forward and backward passes, of which each microbatch has one for each
of the stage's chunks of the chain. Chunk c of stage s of p is number c p + s of the chain. What the stages send each
other follows from that. A send waits for nobody, a receive waits for the message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

Pass = Literal["forward", "backward"]
Kind = Literal[Pass, "send activation", "send gradient", "receive activation", "receive gradient"]


class Action(NamedTuple):
    """What a stage does for the microbatch of this number, by which of its chunks; both are counted from 0.

    A message's chunk is this stage's, which computes what is sent, or takes what is received.
    """

    kind: Kind
    microbatch: int
    chunk: int = 0


Passes = list[tuple[Pass, int, int]]  # each with its microbatch and chunk


def gpipe(stage: int, stages: int, microbatches: int, chunks: int) -> Passes:
    """All forward passes, then all backward ones (Huang et al. 2019), so that all microbatches are alive at once.

    Gradients are computed in the order of the microbatches, as without a pipeline.
    """
    return [*_all("forward", microbatches), *_all("backward", microbatches)]


def one_forward_one_backward(stage: int, stages: int, microbatches: int, chunks: int) -> Passes:
    """A backward pass after each forward pass, as soon as it can be (PipeDream-Flush, Narayanan et al. 2021).

    It takes as long as `gpipe`, and a stage has at most as many microbatches alive as there are stages from it on.
    """
    return _alternating(stages - 1 - stage, _all("forward", microbatches), _all("backward", microbatches))


def interleaved(stage: int, stages: int, microbatches: int, chunks: int) -> Passes:
    """As 1F1B, where each stage has several chunks of the chain (Narayanan et al. 2021, section 2.2).

    Microbatches go through a stage's chunks in turns of as many as there are stages, of which their number is a
    multiple: the first chunk takes a turn's microbatches, then the second, and backward the last one first.
    """

    def order(kind: Pass, listed: range) -> Passes:
        turns = range(0, microbatches, stages)
        return [(kind, first + number, chunk) for first in turns for chunk in listed for number in range(stages)]

    ahead = 2 * (stages - 1 - stage) + (chunks - 1) * stages
    return _alternating(ahead, order("forward", range(chunks)), order("backward", range(chunks)[::-1]))


def _all(kind: Pass, microbatches: int) -> Passes:
    return [(kind, number, 0) for number in range(microbatches)]


def _alternating(ahead: int, forwards: Passes, backwards: Passes) -> Passes:
    """So many forward passes, then a forward and a backward pass in turn, then the remaining backward passes."""
    passes, rest = forwards[:ahead], forwards[ahead:]
    for number, backward in enumerate(backwards):
        passes += [*rest[number : number + 1], backward]
    return passes


# Name in a recipe -> a stage's passes, by its number and that of stages, microbatches, and chunks of each stage.
SCHEDULES: dict[str, Callable[[int, int, int, int], Passes]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
}


def actions(schedule: str, stage: int, stages: int, microbatches: int, chunks: int = 1) -> list[Action]:
    """What a stage, counted from 0, does in one step."""
    listed: list[Action] = []
    for kind, number, chunk in SCHEDULES[schedule](stage, stages, microbatches, chunks):
        is_first, is_last = (stage, chunk) == (0, 0), (stage, chunk) == (stages - 1, chunks - 1)
        if kind == "forward":
            before = [] if is_first else [Action("receive activation", number, chunk)]
            after = [] if is_last else [Action("send activation", number, chunk)]
        else:
            before = [] if is_last else [Action("receive gradient", number, chunk)]
            after = [] if is_first else [Action("send gradient", number, chunk)]
        listed += [*before, Action(kind, number, chunk), *after]
    return listed


def alive(listed: Sequence[Action], sizes: Sequence[int] = ()) -> int:
    """The most microbatches of a stage that have gone forward and not yet back, whose activations it keeps.

    Each counts for every chunk that it is in, or as much as the chunk's `sizes` say.
    """
    most = now = 0
    for action in listed:
        now += {"forward": 1, "backward": -1}.get(action.kind, 0) * (sizes[action.chunk] if sizes else 1)
        most = max(most, now)
    return most


def bubble(stages: int, microbatches: int, chunks: int = 1) -> float:
    """The share of a step in which a stage waits, if all passes take equally long: (p - 1) / (m v + p - 1).

    With p stages, m microbatches and v chunks of each stage; it is (p - 1) / (m v) of the time of the passes.
    """
    return (stages - 1) / (microbatches * chunks + stages - 1)
