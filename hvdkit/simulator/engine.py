"""Runs the tasks of a step, iteration after iteration, until the step time is steady; for one case or many at once.

The tasks are a directed acyclic graph, the model of S. Shi et al. 2018 (arXiv 1805.03812), section III, extended by
resources: tasks on one resource run one after the other in the order of the list. Edges to earlier iterations connect
successive steps.

A task starts when the tasks that it waits for have ended and its resource is free, so the end of every task is made of
sums and maxima of durations. Hence a longer task never shortens a step (there are no scheduling anomalies), and with
arrays as durations one pass simulates a case per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from hvdkit.errors import RequestError

_MOST_ITERATIONS = 24  # a step time that is not steady by then is averaged over the last half
_TOLERANCE = 1e-9  # relative difference between two steps that counts as steady


@dataclass(frozen=True)
class Edge:
    """Wait for the end of the task `name` of `lag` iterations ago; an iteration before the first has always ended."""

    name: str
    lag: int = 0


@dataclass(frozen=True)
class TimedTask:
    """`seconds` is a number, or an array with one element per case. `resource` None means that no resource is used."""

    name: str
    kind: str
    resource: str | None
    seconds: Any
    after: tuple[Edge, ...] = ()


@dataclass(frozen=True)
class TaskSpan:
    """When one task of one iteration runs, in seconds from the start of the first iteration."""

    task: TimedTask
    iteration: int
    start: float
    end: float


@dataclass(frozen=True)
class StepSchedule:
    """`starts` and `ends` of tasks by iteration and task, and `period`, the step time in steady state; all in seconds.

    Each time is a number, or an array with one element per case. `before` is what `_predecessors` returns.
    """

    tasks: Sequence[TimedTask]
    before: list[list[tuple[int, int]]]
    starts: list[list[Any]]
    ends: list[list[Any]]
    period: Any

    def spans(self, iteration: int = -1) -> list[TaskSpan]:
        """The tasks of one iteration; for a schedule of one case."""
        number = iteration % len(self.ends)
        rows = zip(self.tasks, self.starts[number], self.ends[number], strict=True)
        return [TaskSpan(task, number, float(start), float(end)) for task, start, end in rows]

    def busy(self) -> dict[str, Any]:
        """Seconds per step that each resource is in use."""
        seconds: dict[str, Any] = {}
        for task in self.tasks:
            if task.resource is not None:
                seconds[task.resource] = seconds.get(task.resource, 0.0) + task.seconds
        return seconds

    def critical_path(self, iteration: int = -1) -> list[TaskSpan]:
        """The critical path of an iteration, from the end of the step before it to its own; for one case.

        Goes back from the last task, each time to the one that ended latest among those it waited for and the one
        before it on its resource. The path can contain tasks of other iterations, such as input that is read ahead.
        """
        iteration, number = iteration % len(self.ends), len(self.tasks) - 1
        begin = float(self.ends[iteration - 1][number]) if iteration else 0.0
        path: list[TaskSpan] = []
        while True:
            start, end = float(self.starts[iteration][number]), float(self.ends[iteration][number])
            if path and end <= begin:
                break
            if end > start:
                path.append(TaskSpan(self.tasks[number], iteration, start, end))
            reached = [(iteration - lag, other) for lag, other in self.before[number] if iteration >= lag]
            if not reached:
                break
            iteration, number = max(reached, key=lambda waited_for: float(self.ends[waited_for[0]][waited_for[1]]))
        return path[::-1]


def run(tasks: Sequence[TimedTask], iterations: int | None = None) -> StepSchedule:
    """Simulate until the step time is steady in all cases, or for a given number of iterations.

    A step ends with the last task. Raises RequestError for a duplicate name, a negative or infinite time, and a task
    that waits for one that is not before it.
    """
    before = _predecessors(tasks)
    larger = np.maximum if any(isinstance(task.seconds, np.ndarray) for task in tasks) else max
    starts: list[list[Any]] = []
    ends: list[list[Any]] = []
    steps: list[Any] = []
    steady = False
    for iteration in range(iterations or _MOST_ITERATIONS):
        starts.append([])
        ends.append([])
        for task, waits in zip(tasks, before, strict=True):
            reached = [ends[iteration - lag][number] for lag, number in waits if lag <= iteration]
            starts[-1].append(reduce(larger, reached) if reached else 0.0)
            ends[-1].append(starts[-1][-1] + task.seconds)
        if iteration:
            steps.append(ends[-1][-1] - ends[-2][-1])
        steady = len(steps) > 1 and np.allclose(steps[-1], steps[-2], _TOLERANCE, 1e-15)
        if iterations is None and steady:
            break
    half = steps[len(steps) // 2 :] or [ends[0][-1]]
    return StepSchedule(tasks, before, starts, ends, steps[-1] if steady else sum(half) / len(half))


def _predecessors(tasks: Sequence[TimedTask]) -> list[list[tuple[int, int]]]:
    """For each task its predecessors, as (iterations ago, index).

    Predecessors are the tasks that it waits for, and the one that runs before it on its resource.
    """
    index = {task.name: number for number, task in enumerate(tasks)}
    if len(index) < len(tasks):
        raise RequestError("tasks: expected each name once")
    before: list[list[tuple[int, int]]] = []
    latest = {task.resource: (1, number) for number, task in enumerate(tasks)}  # at first of the iteration before
    for number, task in enumerate(tasks):
        valid = (task.seconds >= 0) & (task.seconds < np.inf)
        if valid is not True and not np.all(valid):
            raise RequestError(f"task {task.name!r}: expected a finite time of at least 0, got {task.seconds}")
        for edge in task.after:
            if index.get(edge.name, len(tasks)) >= (len(tasks) if edge.lag else number):
                raise RequestError(f"task {task.name!r}: expected to wait for a task before it, got {edge.name!r}")
        before.append([(edge.lag, index[edge.name]) for edge in task.after])
        if task.resource is not None:
            before[-1].append(latest[task.resource])
            latest[task.resource] = (0, number)
    return before
