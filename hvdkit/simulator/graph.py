"""A training step as a directed acyclic graph: tasks with a duration, what each waits for, and the resource it uses.

The model of S. Shi et al. 2018 (arXiv 1805.03812), section III, extended by resources: tasks on one resource run one
after the other in the order of the list. Edges to earlier iterations connect successive steps.
"""

from __future__ import annotations

import graphlib
import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.errors import RequestError


@dataclass(frozen=True)
class Edge:
    """Wait for the end of the task `name` of `lag` iterations ago; an iteration before the first has always ended."""

    name: str
    lag: int = 0


@dataclass(frozen=True)
class Task:
    """`seconds` is a number, or an array with one element per case. `resource` None means that no resource is used."""

    name: str
    kind: str
    resource: str | None
    seconds: Any
    after: tuple[Edge, ...] = ()


@dataclass(frozen=True)
class Graph:
    """Tasks in topological order; the step ends with the task `last`."""

    tasks: tuple[Task, ...]
    last: str


def ordered(tasks: Sequence[Task], last: str) -> Graph:
    """The graph of these tasks, sorted topologically; where the dependencies allow it, tasks keep their order.

    Raises RequestError for a duplicate or missing name, a negative or infinite time, and a cycle, with its path.
    """
    index: dict[str, int] = {}
    for task in tasks:
        if task.name in index:
            raise RequestError(f"task {task.name!r}: expected each name once")
        if not _valid(task.seconds):
            raise RequestError(f"task {task.name!r}: expected a finite time of at least 0, got {task.seconds}")
        index[task.name] = len(index)
    for task in tasks:
        for edge in task.after:
            if edge.name not in index or edge.lag < 0:
                raise RequestError(f"task {task.name!r}: expected to wait for a task that is there, got {edge.name!r}")
    if last not in index:
        raise RequestError(f"expected a last task that is there, got {last!r}")
    sorter = graphlib.TopologicalSorter({task.name: [e.name for e in task.after if e.lag == 0] for task in tasks})
    try:
        sorter.prepare()
    except graphlib.CycleError as error:
        path = " -> ".join(reversed(error.args[1]))
        raise RequestError(f"tasks wait for each other in a cycle: {path}") from None
    placed: list[Task] = []
    ready: list[int] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heapq.heappush(ready, index[name])
        placed.append(tasks[heapq.heappop(ready)])
        sorter.done(placed[-1].name)
    return Graph(tuple(placed), last)


def _valid(seconds: Any) -> bool:
    bad = (seconds < 0) | (seconds != seconds) | (seconds == float("inf"))
    return not (bad if isinstance(bad, bool) else bad.any())
