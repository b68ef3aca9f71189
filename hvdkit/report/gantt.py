"""A simulated step as a picture and as a Chrome trace. Matplotlib is loaded only when a picture is drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hvdkit.files import write_atomic
from hvdkit.profiling.profile import Profile
from hvdkit.report import plotting
from hvdkit.simulator.engine import Schedule, Span

_COLOURS = {
    "read": "#8c8c8c", "decode": "#b5b5b5", "copy": "#d9d9d9", "gap": "#e8e0d0", "forward": "#4c8bbf",
    "backward": "#2f5d8a", "compression": "#8a6bb1", "negotiation": "#d8c24a", "fusion": "#e0a458",
    "communication": "#c8553d", "update": "#5a9e6f",
}  # fmt: skip
_WIDE = 0.045  # of the step; a task that takes less has no room for its name


def window(schedule: Schedule) -> tuple[int, float, float, list[Span]]:
    """(number, begin, end, tasks): a step from the end of the update before it, with all that runs in it.

    Not the last one that was simulated, as the input of those behind it is read meanwhile.
    """
    number = max(0, len(schedule.ends) - 4)
    last = next(i for i, task in enumerate(schedule.graph.tasks) if task.name == schedule.graph.last)
    end = float(schedule.ends[number][last])
    begin = float(schedule.ends[number - 1][last]) if number else 0.0
    spans = [span for iteration in range(len(schedule.ends)) for span in schedule.spans(iteration)]
    return (
        number,
        begin,
        end,
        [span for span in spans if span.end > begin and span.start < end and span.end > span.start],
    )


def picture(schedule: Schedule, title: str, path: Path) -> None:
    """A row for each resource, the critical path marked; written to `path` as PNG. Raises RunError where it cannot."""
    number, begin, end, spans = window(schedule)
    critical = {(span.task.name, span.iteration) for span in schedule.critical_path(number)}
    rows = list(dict.fromkeys(_row(span) for span in sorted(spans, key=_height)))
    with plotting.picture(path, 13, 1.4 + 0.75 * len(rows)) as figure:
        from matplotlib.patches import Patch

        axes = figure.subplots()
        for span in spans:
            place = rows.index(_row(span))
            left, right = max(span.start, begin), min(span.end, end)
            marked = (span.task.name, span.iteration) in critical
            start, width, colour = 1e3 * (left - begin), 1e3 * (right - left), _COLOURS[span.task.kind]
            edge = 0.3 if right - left > 0.004 * (end - begin) else 0.0
            axes.barh(place, width, 0.62, start, color=colour, linewidth=edge, edgecolor="white")
            if marked:
                axes.barh(place - 0.42, width, 0.1, start, color="black")
            if right - left > _WIDE * (end - begin):
                name = _short(
                    span.task.name.partition(" ")[2] or span.task.name, int(165 * (right - left) / (end - begin))
                )
                axes.text(
                    1e3 * ((left + right) / 2 - begin), place, name, ha="center", va="center", fontsize=7, color="white"
                )
        axes.set_yticks(range(len(rows)), rows)
        axes.invert_yaxis()
        axes.set(xlabel="ms", xlim=(0, 1e3 * (end - begin)), title=title)
        kinds = [kind for kind in _COLOURS if any(span.task.kind == kind for span in spans)]
        shown = [Patch(color=_COLOURS[kind], label=kind) for kind in kinds] + [
            Patch(color="black", label="critical path")
        ]
        axes.legend(
            handles=shown,
            loc="upper center",
            bbox_to_anchor=(0.5, -0.28 / (0.4 + 0.2 * len(rows))),
            ncols=len(shown),
            fontsize=8,
            frameon=False,
        )
        figure.tight_layout()


def trace(schedule: Schedule, profile: Profile | None, path: Path) -> None:
    """The step for chrome://tracing or Perfetto; the one that was measured, as far as the profile tells, beside it."""
    number, begin, _, spans = window(schedule)
    critical = {(span.task.name, span.iteration) for span in schedule.critical_path(number)}
    rows = list(dict.fromkeys(_row(span) for span in sorted(spans, key=_height)))
    events: list[dict[str, Any]] = [_named("process_name", 1, 0, "simulated")]
    events += [_named("thread_name", 1, place, row) for place, row in enumerate(rows)]
    for span in spans:
        marked = (span.task.name, span.iteration) in critical
        event = _event(
            span.task.name, span.task.kind, span.start - begin, span.end - span.start, 1, rows.index(_row(span))
        )
        events.append(event | {"args": {"critical": marked}})
    if profile is not None:
        events += _measured(profile)
    write_atomic(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _measured(profile: Profile) -> list[dict[str, Any]]:
    events = [_named("process_name", 2, 0, "measured"), _named("thread_name", 2, 0, "device")]
    events.append(_named("thread_name", 2, 1, "communication"))
    forward = 1e-3 * (profile.step.forward_ms.mean if profile.step.forward_ms else 0.0)
    if forward:
        events.append(_event("forward", "forward", 0.0, forward, 2, 0))
    before = 0.0
    for tensor in profile.tensors:
        if tensor.ready_ms > before:
            took = 1e-3 * (tensor.ready_ms - before)
            events.append(_event(f"backward {tensor.name}", "backward", forward + 1e-3 * before, took, 2, 0))
            before = tensor.ready_ms
    for each in profile.communications:
        if each.start_ms is not None:
            name = f"{each.operation} of {each.tensors} ({each.bytes} bytes)"
            events.append(_event(name, "communication", forward + 1e-3 * each.start_ms, 1e-3 * each.ms, 2, 1))
    return events


def _event(name: str, kind: str, start_s: float, seconds: float, process: int, thread: int) -> dict[str, Any]:
    begin = round(1e6 * start_s)  # whole ones: where they are cut, a span could end behind the next one's begin
    times = {"ts": begin, "dur": round(1e6 * (start_s + seconds)) - begin}
    return {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": thread} | times


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _row(span: Span) -> str:
    return span.task.resource or span.task.kind


def _height(span: Span) -> int:
    return list(_COLOURS).index(span.task.kind)


def _short(name: str, room: int) -> str:
    return name if len(name) <= room else name[: max(1, room - 1)] + "…"
