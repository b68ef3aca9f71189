"""The measured steps of all ranks as a Chrome trace, by rank 0's clock; https://ui.perfetto.dev opens it.

Format: "Trace Event Format", Duffy et al., the JSON object with `traceEvents`; times are whole microseconds. Perfetto
truncates fractions, and would drop a span that then ends after the next one begins.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hvdkit.core import trace_events
from hvdkit.core.state import layer_of
from hvdkit.profiling import breakdown
from hvdkit.profiling.breakdown import Phase, TracedStep
from hvdkit.profiling.timeline import Operation

if TYPE_CHECKING:  # a simulated step has no ranks' records
    from hvdkit.profiling.assemble import Findings

_LANES = {"step": 1, "phases": 2, "gradients": 3}
_FIRST = 100  # rank 0's process; Perfetto shows a lane with its process's number first, so these must differ
_HOROVOD = 1_000_000  # the process of Horovod's lanes, after all ranks


def dump(findings: Findings) -> str:
    """The steps with trace events, with details and with the timeline, as JSON; the first one begins at 0."""
    rows = [
        ("with trace events", findings.marked),
        ("detailed", findings.detailed),
        ("with the timeline", findings.traced),
    ]
    zero = min((step.open for _, steps in rows for row in steps for step in row), default=0)
    operations = [op for row in findings.traced for op in row[0].operations]
    processes: list[tuple[int, str, Iterable[str]]] = [
        (_FIRST + rank.rank, f"rank {rank.rank} on {rank.host}", _LANES) for rank in findings.record.ranks
    ]
    if operations:
        processes.append((_HOROVOD, "Horovod, as rank 0 saw it", ("negotiation", "collectives")))
    events = [event for process in processes for event in named(*process)]
    share = findings.negotiation
    for title, steps in rows:
        for number, row in enumerate(steps):
            for rank, step in enumerate(row):
                phases = breakdown.phases(step, findings.beside(row, rank), None if step.operations else share)
                events += _step(step, phases, f"step {number + 1}, {title}", rank, zero)
    events += _operations(operations, zero)
    return as_json(events)


def as_json(events: Iterable[dict[str, Any]]) -> str:
    """A file of these events."""
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": list(events)}) + "\n"


def named(process: int, name: str, lanes: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The name and place of a process and of each of its lanes."""
    yield _meta("process_name", process, name=name)
    yield _meta("process_sort_index", process, sort_index=process)
    for lane, title in enumerate(lanes, start=1):
        yield _meta("thread_name", process, lane, name=title)
        yield _meta("thread_sort_index", process, lane, sort_index=lane)


def _meta(kind: str, process: int, lane: int = 0, **arguments: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": arguments}


def _step(step: TracedStep, phases: Sequence[Phase], title: str, rank: int, zero: int) -> Iterator[dict[str, Any]]:
    process = _FIRST + rank
    yield _span(title, "step", process, _LANES["step"], step.open, step.end, zero)
    for phase in phases:
        if phase.end > phase.start:
            yield _span(phase.kind, "phase", process, _LANES["phases"], phase.start, phase.end, zero)
    yield from _details(step.details, step.phases, process, zero)


def _details(
    details: Sequence[tuple[str, int]], phases: Sequence[Phase], process: int, zero: int
) -> Iterator[dict[str, Any]]:
    """Layers and gradients as spans, each from the end of the span before it or from the start of its phase."""
    starts = sorted(phase.start for phase in phases)
    before = 0
    for name, at in details:
        if name.startswith((trace_events.PUT, trace_events.ACTION)):
            continue
        forward = name.startswith(trace_events.LAYER)
        bare = name.removeprefix(trace_events.LAYER) if forward else name.removeprefix(trace_events.READY)
        begun = max([start for start in starts if start <= at], default=at)
        label = f"forward {bare}" if forward else f"gradient {bare}"
        begin = max(before, begun)
        yield _span(label, layer_of(bare), process, _LANES["gradients"], min(begin, at), at, zero)
        before = at


def _operations(operations: Sequence[Operation], zero: int) -> Iterator[dict[str, Any]]:
    """Collectives and their negotiation, in the order in which they began; the spans of a lane do not overlap."""
    negotiated = ended = zero
    for op in operations:
        arguments = {"tensors": len(op.names), "bytes": op.bytes, "first": op.names[0] if op.names else ""}
        requested = op.start if op.requested is None else max(op.requested, negotiated)
        if requested < op.start:
            yield _span("negotiation", "horovod", _HOROVOD, 1, requested, op.start, zero)
        start = max(op.start, ended)
        yield _span(op.operation, "horovod", _HOROVOD, 2, start, max(start, op.end), zero) | {"args": arguments}
        negotiated, ended = max(negotiated, op.start), max(ended, op.end)


def _span(name: str, category: str, process: int, lane: int, start: int, end: int, zero: int) -> dict[str, Any]:
    return span(name, category, process, lane, (start - zero) / 1e3, (end - zero) / 1e3)


def span(name: str, category: str, process: int, lane: int, start_us: float, end_us: float) -> dict[str, Any]:
    """What took from `start_us` to `end_us`."""
    event = {"ph": "X", "name": name, "cat": category, "pid": process, "tid": lane}
    begin = round(start_us)
    return event | {"ts": begin, "dur": round(end_us) - begin}
