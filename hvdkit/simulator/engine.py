"""Runs the graph of a step, iteration after iteration, until the step time is steady; for one case or many at once.

A task starts when the tasks that it waits for have ended and its resource is free. A resource runs its tasks in the
graph's order, so the end of every task is made of sums and maxima of durations. Hence a longer task never shortens a
step (there are no scheduling anomalies), and with arrays as durations one pass simulates a case per element.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.simulator.graph import Graph, Task

_MOST_ITERATIONS = 24  # a step time that is not steady by then is averaged over the last half
_TOLERANCE = 1e-9  # relative difference between two steps that counts as steady


@dataclass(frozen=True)
class Span:
    """When one task of one iteration runs, in seconds from the start of the first iteration."""

    task: Task
    iteration: int
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """`starts` and `ends` of tasks by iteration and task, and `period`, the step time in steady state; all in seconds.

    Each time is a number, or an array with one element per case.
    """

    graph: Graph
    starts: list[list[Any]]
    ends: list[list[Any]]
    period: Any

    def spans(self, iteration: int = -1) -> list[Span]:
        """The tasks of one iteration; for a schedule of one case."""
        number = iteration % len(self.ends)
        rows = zip(self.graph.tasks, self.starts[number], self.ends[number], strict=True)
        return [Span(task, number, float(start), float(end)) for task, start, end in rows]

    def busy(self) -> dict[str, Any]:
        """Seconds per step that each resource is in use."""
        seconds: dict[str, Any] = {}
        for task in self.graph.tasks:
            if task.resource is not None:
                seconds[task.resource] = seconds.get(task.resource, 0.0) + task.seconds
        return seconds

    def critical_path(self, number: int = -1) -> list[Span]:
        """The critical path of iteration `number`, from the end of the step before it to its own; for one case.

        Goes back from the last task, each time to the one that ended latest among those it waited for and the one
        before it on its resource. The path can contain tasks of other iterations, such as input that is read ahead.
        """
        index, before = _predecessors(self.graph)
        iteration, number = number % len(self.ends), index[self.graph.last]
        begin = float(self.ends[iteration - 1][number]) if iteration else 0.0
        path: list[Span] = []
        while True:
            start, end = float(self.starts[iteration][number]), float(self.ends[iteration][number])
            if path and end <= begin:
                break
            if end > start:
                path.append(Span(self.graph.tasks[number], iteration, start, end))
            reached = [(iteration - lag, other) for lag, other in before[number] if iteration >= lag]
            if not reached:
                break
            iteration, number = max(reached, key=lambda place: float(self.ends[place[0]][place[1]]))
        return path[::-1]


def run(graph: Graph, iterations: int | None = None) -> Schedule:
    """Simulate until the step time is steady in all cases, or for a given number of iterations."""
    batch = any(isinstance(task.seconds, np.ndarray) for task in graph.tasks)
    larger = np.maximum if batch else max
    index, _ = _predecessors(graph)
    plan = [
        (task.seconds, task.resource, [(index[edge.name], edge.lag) for edge in task.after]) for task in graph.tasks
    ]
    last = index[graph.last]
    free: dict[str, Any] = {}
    starts: list[list[Any]] = []
    ends: list[list[Any]] = []
    steps: list[Any] = []
    for iteration in range(iterations or _MOST_ITERATIONS):
        begun: list[Any] = []
        ended: list[Any] = []
        starts.append(begun)
        ends.append(ended)
        for seconds, resource, after in plan:
            start: Any = free.get(resource, 0.0) if resource is not None else 0.0
            for other, lag in after:
                if lag <= iteration:
                    start = larger(start, ends[iteration - lag][other])
            end = start + seconds
            if resource is not None:
                free[resource] = end
            begun.append(start)
            ended.append(end)
        if iteration:
            steps.append(ends[iteration][last] - ends[iteration - 1][last])
        if iterations is None and len(steps) > 1 and _same(steps[-1], steps[-2]):
            break
    half = steps[len(steps) // 2 :]
    steady = len(steps) > 1 and _same(steps[-1], steps[-2])
    period = (steps[-1] if steady else sum(half) / len(half)) if steps else ends[0][last]
    return Schedule(graph, starts, ends, period)


def _predecessors(graph: Graph) -> tuple[dict[str, int], list[list[tuple[int, int]]]]:
    """The index of each task by name; for each task its predecessors, as (iterations ago, index).

    Predecessors are the tasks that it waits for, and the one that runs before it on its resource.
    """
    index = {task.name: number for number, task in enumerate(graph.tasks)}
    before = [[(edge.lag, index[edge.name]) for edge in task.after] for task in graph.tasks]
    on: dict[str, list[int]] = {}
    for number, task in enumerate(graph.tasks):
        if task.resource is not None:
            on.setdefault(task.resource, []).append(number)
    for numbers in on.values():
        before[numbers[0]].append((1, numbers[-1]))
        for earlier, later in itertools.pairwise(numbers):
            before[later].append((0, earlier))
    return index, before


def _same(a: Any, b: Any) -> bool:
    return bool(np.all(np.abs(a - b) <= _TOLERANCE * np.abs(b) + 1e-15))
