"""A step of training as a directed acyclic graph: tasks with a duration, what each waits for, and what it occupies.

S. Shi et al. 2018 (arXiv 1805.03812), section III, with resources added: those of one resource run one after the other
in the order of the list. An edge may reach back to an earlier iteration, which is how steps hang together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvdkit.errors import RequestError


@dataclass(frozen=True)
class Edge:
    """Wait for the end of the task `name` of `lag` iterations ago; before the first iteration nothing is waited for."""

    name: str
    lag: int = 0


@dataclass(frozen=True)
class Task:
    """`seconds` is a number, or an array with one for each what-if. Without a `resource` nothing is occupied."""

    name: str
    kind: str
    resource: str | None
    seconds: Any
    after: tuple[Edge, ...] = ()


@dataclass(frozen=True)
class Graph:
    """Tasks in an order in which each comes behind what it waits for within its iteration; `last` ends the step."""

    tasks: tuple[Task, ...]
    last: str


def ordered(tasks: Sequence[Task], last: str) -> Graph:
    """A graph of tasks in any order; those that may go first keep their order.

    Raises RequestError for a name that is there twice or is not there, a negative time, and a cycle, with its path.
    """
    known: dict[str, Task] = {}
    for task in tasks:
        if task.name in known:
            raise RequestError(f"task {task.name!r}: expected each name once")
        if not _fine(task.seconds):
            raise RequestError(f"task {task.name!r}: expected a finite time of at least 0, got {task.seconds}")
        known[task.name] = task
    for task in tasks:
        for edge in task.after:
            if edge.name not in known or edge.lag < 0:
                raise RequestError(f"task {task.name!r}: expected to wait for a task that is there, got {edge.name!r}")
    if last not in known:
        raise RequestError(f"expected a last task that is there, got {last!r}")
    placed: dict[str, Task] = {}
    for task in tasks:
        _place(task, known, placed)
    return Graph(tuple(placed.values()), last)


def _place(task: Task, known: dict[str, Task], placed: dict[str, Task]) -> None:
    stack, open_ = [task], {task.name: None} if task.name not in placed else {}
    while stack:
        top = stack[-1]
        missing = next((e.name for e in top.after if e.lag == 0 and e.name not in placed), None)
        if top.name in placed or missing is None:
            placed.setdefault(top.name, top)
            open_.pop(stack.pop().name, None)
        elif missing in open_:
            path = list(open_)[list(open_).index(missing) :]
            raise RequestError(f"tasks wait for each other in a cycle: {' -> '.join([*path, missing])}")
        else:
            open_[missing] = None
            stack.append(known[missing])


def _fine(seconds: Any) -> bool:
    bad = (seconds < 0) | (seconds != seconds) | (seconds == float("inf"))
    return not (bad if isinstance(bad, bool) else bad.any())
