"""The measured steps of all ranks as a Chrome trace, by one clock; https://ui.perfetto.dev opens it.

Format: "Trace Event Format", Duffy et al., the JSON object with `traceEvents`; times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from hvdkit.core import marks
from hvdkit.core.state import layer_of
from hvdkit.profiling.assemble import Findings
from hvdkit.profiling.split import Phase, Step, stretches

_LANES = {"step": 1, "phases": 2, "gradients": 3}
_HOROVOD = 1_000_000  # as a process, behind all ranks


def dump(found: Findings) -> str:
    """Marked, detailed and traced steps as JSON; the first one begins at 0."""
    rows = [("marked", found.marked), ("detailed", found.detailed), ("with the timeline", found.traced)]
    zero = min((step.open for _, steps in rows for row in steps for step in row), default=0)
    events = list(_named(found))
    share = found.negotiation
    for title, steps in rows:
        for number, row in enumerate(steps):
            for rank, step in enumerate(row):
                phases = stretches(step, row, None if step.operations else share)
                events += _step(step, phases, f"step {number + 1}, {title}", rank, zero)
    for row in found.traced:
        events += _operations(row[0], zero)
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _named(found: Findings) -> Iterator[dict[str, Any]]:
    for rank in found.record.ranks:
        yield _meta("process_name", rank.rank, name=f"rank {rank.rank} on {rank.host}")
        yield _meta("process_sort_index", rank.rank, sort_index=rank.rank)
        for name, lane in _LANES.items():
            yield _meta("thread_name", rank.rank, lane, name=name)
    if any(step.operations for row in found.traced for step in row):
        yield _meta("process_name", _HOROVOD, name="Horovod, as rank 0 saw it")
        yield _meta("thread_name", _HOROVOD, 1, name="negotiation")
        yield _meta("thread_name", _HOROVOD, 2, name="collectives")


def _meta(kind: str, process: int, lane: int = 0, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": arguments}


def _step(step: Step, phases: Sequence[Phase], title: str, rank: int, zero: int) -> Iterator[dict[str, Any]]:
    yield _span(title, "step", rank, _LANES["step"], step.open, step.end, zero)
    for phase in phases:
        if phase.end > phase.start:
            yield _span(phase.kind, "phase", rank, _LANES["phases"], phase.start, phase.end, zero)
    yield from _details(step.details, step.phases, rank, zero)


def _details(
    details: Sequence[tuple[str, int]], phases: Sequence[Phase], rank: int, zero: int
) -> Iterator[dict[str, Any]]:
    """Layers as spans that end when the layer ends, one behind the other in their phase."""
    starts = sorted(phase.start for phase in phases)
    before = 0
    for name, at in details:
        if name.startswith(marks.PUT):
            continue
        forward = name.startswith(marks.LAYER)
        bare = name.removeprefix(marks.LAYER) if forward else name.removeprefix(marks.READY)
        begun = max([start for start in starts if start <= at], default=at)
        label = f"forward {bare}" if forward else f"gradient {bare}"
        begin = max(before, begun)
        yield _span(label, layer_of(bare), rank, _LANES["gradients"], min(begin, at), at, zero)
        before = at


def _operations(step: Step, zero: int) -> Iterator[dict[str, Any]]:
    for each in step.operations:
        told = {"tensors": len(each.names), "bytes": each.bytes, "first": each.names[0] if each.names else ""}
        if each.asked is not None and each.asked < each.start:
            yield _span("negotiation", "horovod", _HOROVOD, 1, each.asked, each.start, zero)
        yield _span(each.operation, "horovod", _HOROVOD, 2, each.start, each.end, zero) | {"args": told}


def _span(name: str, category: str, process: int, lane: int, start: int, end: int, zero: int) -> dict[str, Any]:
    span = {"ph": "X", "name": name, "cat": category, "pid": process, "tid": lane}
    return span | {"ts": (start - zero) / 1e3, "dur": (end - start) / 1e3}
