"""A simulated step as a picture and as a Chrome trace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdkit.files import write_atomic
from hvdkit.profiling import chrome_trace
from hvdkit.report import plotting
from hvdkit.report.canvas import brief
from hvdkit.results.profile import Profile
from hvdkit.simulator.engine import StepSchedule, TaskSpan

_COLOURS = {
    "read": "#8c8c8c", "decode": "#b5b5b5", "copy": "#d9d9d9", "gap": "#e8e0d0", "forward": "#4c8bbf",
    "backward": "#2f5d8a", "compression": "#8a6bb1", "negotiation": "#d8c24a", "fusion": "#e0a458",
    "communication": "#c8553d", "update": "#2a9d9d",
}  # fmt: skip
_WIDE = 0.055  # of the step; a shorter task has no room for its name
_INCHES = 10  # of the picture's width: its letters are as large on a page as the page's
_PIXELS = 1000  # in which the step is drawn, about


def window(schedule: StepSchedule) -> tuple[set[tuple[str, int]], float, float, list[TaskSpan]]:
    """(critical path, begin, end, tasks) of a step: from the end of the previous update, with all tasks that run in it.

    It is not the last simulated step, because the input of later steps is read during a step.
    """
    number = max(0, len(schedule.ends) - 4)
    end = float(schedule.ends[number][-1])
    begin = float(schedule.ends[number - 1][-1]) if number else 0.0
    spans = [span for iteration in range(len(schedule.ends)) for span in schedule.spans(iteration)]
    shown = [span for span in spans if span.end > begin and span.start < end and span.end > span.start]
    return {(span.task.name, span.iteration) for span in schedule.critical_path(number)}, begin, end, shown


def picture(schedule: StepSchedule, title: str, path: Path) -> None:
    """Draw a row for each resource, with the critical path; written to `path` as PNG. Raises RunError if that fails."""
    critical, begin, end, spans = window(schedule)
    rows = _rows(spans)
    length = 1e3 * max(end - begin, 1e-12)  # ms
    pixel = length / _PIXELS
    height = 1.6 + 0.7 * len(rows)  # inches
    with plotting.picture(path, _INCHES, height) as figure:
        axes = figure.subplots()
        left = 0.3 + 0.08 * max(
            len(brief(row)) for row in rows
        )  # a layout that Matplotlib finds takes a second drawing
        figure.subplots_adjust(left=left / _INCHES, right=0.99, bottom=1.1 / height, top=1 - 0.4 / height)
        bars: dict[tuple[str, int], list[tuple[float, float]]] = {}  # by kind and row
        marks: dict[int, list[tuple[float, float]]] = {}  # of the critical path, by row
        for span in spans:
            first, last = (1e3 * (at - begin) for at in (max(span.start, begin), min(span.end, end)))
            row, took = rows.index(_row(span)), last - first
            gap = pixel / 4 if took > 5 * pixel else 0.0  # separates consecutive tasks of the same kind
            bar = (first + gap, max(took - 2 * gap, pixel))  # the shortest tasks are visible too
            bars.setdefault((span.task.kind, row), []).append(bar)
            if (span.task.name, span.iteration) in critical:
                marks.setdefault(row, []).append((first, max(took, pixel)))
            if took > _WIDE * length:
                name = brief(span.task.name.partition(" ")[2] or span.task.name, int(took / pixel / 9))
                axes.text(first + took / 2, row, name, color="white", fontsize=8, ha="center", va="center")
        for kind in dict.fromkeys(kind for kind in _COLOURS for known, _ in bars if known == kind):
            label = "between steps" if kind == "gap" else kind
            for row in [row for known, row in bars if known == kind]:
                axes.broken_barh(
                    bars[kind, row], (row - 0.31, 0.62), color=_COLOURS[kind], lw=0, snap=False, label=label
                )
                label = f"_{label}"  # once in the legend
        label = "critical path"
        for row, mine in marks.items():
            axes.broken_barh(mine, (row - 0.47, 0.1), color="black", lw=0, label=label)
            label = f"_{label}"
        axes.set(xlim=(0, length), ylim=(len(rows) - 0.5, -0.58), xlabel="ms", title=brief(title, 85))
        axes.set_yticks(range(len(rows)), [brief(row) for row in rows])
        axes.xaxis.set_major_formatter("{x:,g}")
        figure.legend(loc="lower center", ncols=6, frameon=False, fontsize=10)


def trace(schedule: StepSchedule, profile: Profile, path: Path) -> None:
    """Write the step for chrome://tracing or Perfetto, with the measured step of the profile beside it."""
    critical, begin, _, spans = window(schedule)
    rows = _rows(spans)
    events = [
        *chrome_trace.named(1, "simulated", rows),
        *chrome_trace.named(2, "measured", ("device", "communication")),
    ]
    for span in spans:
        task, times = span.task, (1e6 * (span.start - begin), 1e6 * (span.end - begin))
        event = chrome_trace.span(task.name, task.kind, 1, 1 + rows.index(_row(span)), *times)
        events.append(event | {"args": {"critical": (task.name, span.iteration) in critical}})
    write_atomic(path, chrome_trace.as_json([*events, *_measured(profile)]))


def _measured(profile: Profile) -> Iterator[dict[str, Any]]:
    forward = 1e3 * (profile.step.forward_ms.mean if profile.step.forward_ms else 0.0)
    if forward:
        yield chrome_trace.span("forward", "forward", 2, 1, 0.0, forward)
    before = 0.0
    for tensor in profile.tensors:
        if tensor.ready_ms > before:
            times = forward + 1e3 * before, forward + 1e3 * tensor.ready_ms
            yield chrome_trace.span(f"backward {tensor.name}", "backward", 2, 1, *times)
            before = tensor.ready_ms
    for op in profile.communications:
        if op.start_ms is not None:
            name = f"{op.operation} of {op.tensors} ({op.bytes} bytes)"
            begin = forward + 1e3 * op.start_ms
            yield chrome_trace.span(name, "communication", 2, 2, begin, begin + 1e3 * op.ms)


def _row(span: TaskSpan) -> str:
    return span.task.resource or span.task.kind


def _rows(spans: list[TaskSpan]) -> list[str]:
    """The rows of the picture, in the order of _COLOURS."""
    kinds = list(_COLOURS)
    return list(dict.fromkeys(_row(span) for span in sorted(spans, key=lambda span: kinds.index(span.task.kind))))
