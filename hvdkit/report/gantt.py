"""A simulated step as a picture and as a Chrome trace. Pillow is loaded when a picture is drawn."""

from __future__ import annotations

import importlib.util
import io
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdkit.files import write_atomic
from hvdkit.report.canvas import brief
from hvdkit.results.profile import Profile
from hvdkit.simulator.engine import Schedule, Span

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw
    from PIL.ImageFont import FreeTypeFont, ImageFont

_COLOURS = {
    "read": "#8c8c8c", "decode": "#b5b5b5", "copy": "#d9d9d9", "gap": "#e8e0d0", "forward": "#4c8bbf",
    "backward": "#2f5d8a", "compression": "#8a6bb1", "negotiation": "#d8c24a", "fusion": "#e0a458",
    "communication": "#c8553d", "update": "#5a9e6f",
}  # fmt: skip
_WIDE = 0.045  # of the step; a shorter task has no room for its name
_WIDTH, _RIGHT, _TOP, _ROW = 1430, 1414, 40, 76  # pixels: of the picture, where the bars end and begin, of a row
_FINE = 8  # columns per pixel while bars are drawn, as Pillow's rectangles end at whole columns


def window(schedule: Schedule) -> tuple[set[tuple[str, int]], float, float, list[Span]]:
    """(critical path, begin, end, tasks) of a step: from the end of the previous update, with all tasks that run in it.

    It is not the last simulated step, because the input of later steps is read during a step.
    """
    number = max(0, len(schedule.ends) - 4)
    end = float(schedule.ends[number][-1])
    begin = float(schedule.ends[number - 1][-1]) if number else 0.0
    spans = [span for iteration in range(len(schedule.ends)) for span in schedule.spans(iteration)]
    shown = [span for span in spans if span.end > begin and span.start < end and span.end > span.start]
    return {(span.task.name, span.iteration) for span in schedule.critical_path(number)}, begin, end, shown


def picture(schedule: Schedule, title: str, path: Path) -> None:
    """Draw a row for each resource, with the critical path; written to `path` as PNG. Raises RunError if that fails.

    It uses Pillow because importing a plotting library takes longer than the whole prediction.
    """
    from PIL import Image, ImageDraw

    critical, begin, end, spans = window(schedule)
    rows = _rows(spans)
    words, small, tiny = _font(15), _font(12), _font(11)
    left = 32 + round(max(words.getlength(brief(row)) for row in rows))
    bottom = _TOP + _ROW * len(rows)
    length = max(end - begin, 1e-9)
    scale = (_RIGHT - left) / length  # pixels a second
    image = Image.new("RGB", (_WIDTH, bottom + 104), "white")
    bars = Image.new("RGB", (_FINE * (_RIGHT - left), bottom - _TOP), "white")
    paint, pen = ImageDraw.Draw(bars), ImageDraw.Draw(image)
    named: list[tuple[float, float, str]] = []
    for span in spans:
        from_, to = (scale * (at - begin) for at in (max(span.start, begin), min(span.end, end)))
        middle = _ROW * (rows.index(_row(span)) + 0.58)
        gap = 0.25 if to - from_ > 5 else 0.0  # separates consecutive tasks of the same kind
        _bar(paint, from_ + gap, to - gap, middle - 0.31 * _ROW, middle + 0.31 * _ROW, _COLOURS[span.task.kind])
        if (span.task.name, span.iteration) in critical:
            _bar(paint, from_, to, middle - 0.47 * _ROW, middle - 0.37 * _ROW, "black")
        if to - from_ > _WIDE * (_RIGHT - left):
            name = brief(span.task.name.partition(" ")[2] or span.task.name, int((to - from_) / 7.3))
            named.append((left + (from_ + to) / 2, _TOP + middle, name))
    image.paste(bars.reduce((_FINE, 1)), (left, _TOP))
    for x, y, name in named:
        pen.text((x, y), name, "white", tiny, "mm")
    pen.rectangle((left, _TOP, _RIGHT, bottom), outline="black")
    for index, row in enumerate(rows):
        y = _TOP + _ROW * (index + 0.58)
        pen.line((left - 5, y, left, y), "black")
        pen.text((left - 10, y), brief(row), "black", words, "rm")
    for milliseconds, text in _ticks(1e3 * length):
        x = left + scale * milliseconds / 1e3
        pen.line((x, bottom, x, bottom + 5), "black")
        pen.text((x, bottom + 9), text, "black", words, "mt")
    pen.text(((left + _RIGHT) / 2, bottom + 32), "ms", "black", words, "mt")
    pen.text(((left + _RIGHT) / 2, 24), brief(title, 110), "black", _font(18), "mm")
    used = {span.task.kind for span in spans}
    kinds = [("between steps" if kind == "gap" else kind, _COLOURS[kind]) for kind in _COLOURS if kind in used]
    kinds.append(("critical path", "black"))
    x = (left + _RIGHT - sum(56 + small.getlength(kind) for kind, _ in kinds)) / 2
    for kind, colour in kinds:
        pen.rectangle((x, bottom + 70, x + 26, bottom + 80), fill=colour)
        pen.text((x + 34, bottom + 75), kind, "black", small, "lm")
        x += 56 + small.getlength(kind)
    drawn = io.BytesIO()
    image.save(drawn, "png")
    write_atomic(path, drawn.getvalue())


def _bar(paint: ImageDraw, from_: float, to: float, top: float, bottom: float, colour: str) -> None:
    """Draw a rectangle, at least a pixel wide, so that the shortest tasks are visible too."""
    first, last = round(_FINE * from_), round(_FINE * to) - 1  # Pillow includes the last column
    paint.rectangle((first, round(top), max(first + _FINE - 1, last), round(bottom)), fill=colour)


def _font(size: int) -> FreeTypeFont | ImageFont:
    """DejaVu Sans, which covers most scripts and comes with Matplotlib; else Pillow's default font."""
    from PIL import ImageFont

    spec = importlib.util.find_spec("matplotlib")
    try:
        path = Path(str(spec and spec.origin)).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"
        return ImageFont.truetype(str(path), size, layout_engine=ImageFont.Layout.BASIC)
    except OSError:
        return ImageFont.load_default(size)


def _ticks(most: float) -> list[tuple[float, str]]:
    """At most ten round numbers from 0 to `most`, with their labels."""
    power = 10.0 ** math.floor(math.log10(most / 9))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= most / 9)
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(number * step, f"{number * step:,.{digits}f}") for number in range(math.floor(most / step + 1e-9) + 1)]


def trace(schedule: Schedule, profile: Profile, path: Path) -> None:
    """Write the step for chrome://tracing or Perfetto, with the measured step of the profile beside it."""
    critical, begin, _, spans = window(schedule)
    rows = _rows(spans)
    events: list[dict[str, Any]] = [_named("process_name", 1, 0, "simulated")]
    events += [_named("thread_name", 1, index, row) for index, row in enumerate(rows)]
    for span in spans:
        task, row = span.task, rows.index(_row(span))
        event = _event(task.name, task.kind, span.start - begin, span.end - span.start, 1, row)
        events.append(event | {"args": {"critical": (task.name, span.iteration) in critical}})
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
    for op in profile.communications:
        if op.start_ms is not None:
            name = f"{op.operation} of {op.tensors} ({op.bytes} bytes)"
            events.append(_event(name, "communication", forward + 1e-3 * op.start_ms, 1e-3 * op.ms, 2, 1))
    return events


def _event(name: str, kind: str, start_s: float, seconds: float, process: int, thread: int) -> dict[str, Any]:
    begin = round(1e6 * start_s)  # rounded at both ends, so that no span ends after the next one begins
    times = {"ts": begin, "dur": round(1e6 * (start_s + seconds)) - begin}
    return {"name": name, "cat": kind, "ph": "X", "pid": process, "tid": thread} | times


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _row(span: Span) -> str:
    return span.task.resource or span.task.kind


def _rows(spans: list[Span]) -> list[str]:
    """The rows of the picture, in the order of _COLOURS."""
    kinds = list(_COLOURS)
    return list(dict.fromkeys(_row(span) for span in sorted(spans, key=lambda span: kinds.index(span.task.kind))))
