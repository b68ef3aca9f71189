"""Runs a graph, iteration after iteration, until steps take equally long: for one case, or for many at once.

Every task starts when all that it waits for has ended and its resource is free. As each resource keeps the graph's
order, ends are sums and maxima of durations: longer tasks never make a step shorter (no scheduling anomalies), and one
sweep with arrays for durations answers as many what-ifs as they have elements.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdkit.simulator.graph import Graph, Task

_MOST = 24  # iterations; what has not settled by then is averaged over the last half
_SETTLED = 1e-9


@dataclass(frozen=True)
class Span:
    """One task of one iteration in time, seconds from the first iteration's begin."""

    task: Task
    iteration: int
    start: float
    end: float


@dataclass(frozen=True)
class Schedule:
    """`starts` and `ends` by iteration and task; `period` is the time of a step in steady state.

    `starts` and `ends` are numbers, or arrays with one for each what-if.
    """

    graph: Graph
    starts: list[list[Any]]
    ends: list[list[Any]]
    period: Any

    @property
    def makespan(self) -> Any:
        """The end of the last task of all iterations."""
        return np.maximum.reduce([np.asarray(end) for row in self.ends for end in row])

    def spans(self, iteration: int = -1) -> list[Span]:
        """The tasks of one iteration, of one case."""
        number = iteration % len(self.ends)
        rows = zip(self.graph.tasks, self.starts[number], self.ends[number], strict=True)
        return [Span(task, number, float(start), float(end)) for task, start, end in rows]

    def busy(self) -> dict[str, Any]:
        """Seconds a step by resource."""
        seconds: dict[str, Any] = {}
        for task in self.graph.tasks:
            if task.resource is not None:
                seconds[task.resource] = seconds.get(task.resource, 0.0) + task.seconds
        return seconds

    def critical_path(self, number: int = -1) -> list[Span]:
        """What the length of a step (the last) hangs on, from the end of the step before to its own; of one case.

        Going back from the last task, always to the latest of what it waited for or followed on its resource. Tasks of
        other iterations (input that was read ahead) belong to it where they decide.
        """
        index, before = _before(self.graph)
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
    """Sweep until the step time settles (in all cases), or for a number of iterations."""
    batch = any(isinstance(task.seconds, np.ndarray) for task in graph.tasks)
    larger = np.maximum if batch else max
    index, _ = _before(graph)
    plan = [
        (task.seconds, task.resource, [(index[edge.name], edge.lag) for edge in task.after]) for task in graph.tasks
    ]
    last = index[graph.last]
    free: dict[str, Any] = {}
    starts: list[list[Any]] = []
    ends: list[list[Any]] = []
    steps: list[Any] = []
    for iteration in range(iterations or _MOST):
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
    settled = len(steps) > 1 and _same(steps[-1], steps[-2])
    period = (steps[-1] if settled else sum(half) / len(half)) if steps else ends[0][last]
    return Schedule(graph, starts, ends, period)


def _before(graph: Graph) -> tuple[dict[str, int], list[list[tuple[int, int]]]]:
    """Each task's place, and by task what it waits for or follows on its resource, as (iterations ago, place)."""
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
    return bool(np.all(np.abs(a - b) <= _SETTLED * np.abs(b) + 1e-15))
