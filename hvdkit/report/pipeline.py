"""A step of a pipeline as a Gantt chart: measured, and below it as its schedule predicts it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hvdkit.report import plotting
from hvdkit.report.canvas import BAD, GRID, INK, MUTED, SURFACE, Chart, drawing, series
from hvdkit.report.tabular import Cell, number
from hvdkit.results.pipeline import Doing, PipelineStep, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SHOWN: dict[Doing, str] = {
    "forward": "forward", "backward": "backward", "wait": "waits for a message", "send": "starts a message",
    "average": "adds up and averages", "update": "update", "input": "input", "other": "other",
}  # fmt: skip
_INCHES: dict[str, str] = {  # the colours of a picture
    "forward": "#7fb3d9", "backward": "#2f6ea5", "wait": "#f7e3ad", "send": "#c8403a", "average": "#e8893b",
    "update": "#2a9d9d", "input": "#8c8c8c", "other": "#dddddd", "ink": "#222222", "on backward": "#ffffff",
}  # fmt: skip
_PAGE: dict[str, str] = {
    "forward": series(0), "backward": series(0), "wait": GRID, "send": BAD, "average": series(1),
    "update": series(2), "input": series(4), "other": MUTED, "ink": INK, "on backward": SURFACE,
}  # fmt: skip
_FAINT = 0.35  # of forward passes, where they have the colour of backward ones


def headings(step: PipelineStep) -> tuple[str, str]:
    """What stands above the measured step, and above the predicted one."""
    length = max(span.end_ms for rank in step.ranks for span in rank.measured)
    percent = [f"{100 * share:.0f} %" for share in (step.bubble, step.predicted_bubble, step.equal_bubble)]
    return (
        f"Measured: {length:.1f} ms; bubble {percent[0]}, the mean of {step.measured_steps} steps",
        f"Predicted: {step.predicted_ms:.1f} ms, bubble {percent[1]}; with passes of one length {percent[2]}",
    )


def picture(step: PipelineStep, *paths: Path) -> None:
    """Draw the chart into files, PNG or SVG by their names. Raises RunError if one cannot be written."""
    height = 1.9 + 0.76 * len(step.ranks)
    with plotting.picture(paths[0], 11, height, "constrained", paths[1:]) as figure:
        _draw(figure, step, _INCHES, 11 * 72)
        figure.suptitle(
            f"{step.framework}, {step.model}: {len(step.of_stages)} stages, {step.microbatches} microbatches, "
            f"{step.schedule}",
            x=0.01,
            ha="left",
            fontsize=11,
        )


def chart(step: PipelineStep) -> Iterator[Chart]:
    """The chart of a page."""
    columns = ["rank", "stage", *(f"{what}, ms" for what in _SHOWN.values()), "step, ms"]
    title = f"A step in {len(step.of_stages)} stages, {step.microbatches} microbatches, {step.schedule}"
    with drawing(120 + 52 * len(step.ranks), "pipeline", title, columns) as canvas:
        _draw(canvas.figure, step, _PAGE, 420)
        for rank in step.ranks:
            sums = [sum(span.end_ms - span.start_ms for span in rank.measured if span.doing == what) for what in _SHOWN]
            canvas.table.rows.append(
                [Cell(str(rank.rank)), Cell(str(rank.stage)), *(number(ms, 2) for ms in [*sums, sum(sums)])]
            )
        yield canvas.chart(". ".join(headings(step)) + ".")


def sentences(step: PipelineStep) -> list[str]:
    """The bubble in words, and what each stage takes for a pass."""
    passes = [
        f"stage {number} {forward:.2f} and {backward:.2f} ms"
        for number, (forward, backward) in enumerate(zip(step.forward_ms, step.backward_ms, strict=True))
    ]
    return [f"{line}." for line in headings(step)] + [f"Forward and backward of a microbatch: {', '.join(passes)}."]


def _draw(figure: Figure, step: PipelineStep, colours: Mapping[str, str], points: float) -> None:
    above, below = figure.subplots(2, 1, sharex=True)
    end = max(span.end_ms for rank in step.ranks for span in rank.measured)
    begin = min(span.start_ms for rank in step.ranks for span in rank.measured if span.doing == "forward")
    end = max(end, begin + step.predicted_ms)
    measured = [rank.measured for rank in step.ranks]
    predicted = [[span.moved(begin) for span in rank.predicted] for rank in step.ranks]
    used: dict[str, None] = {}
    for axes, rows, title in zip((above, below), (measured, predicted), headings(step), strict=True):
        used |= _rows(axes, rows, colours, end / (0.85 * points))
        axes.set_title(title, loc="left", fontsize=10, fontweight="normal")
        axes.set_yticks(range(len(rows)), [f"rank {rank.rank}, stage {rank.stage}" for rank in step.ranks], fontsize=10)
        axes.tick_params(axis="y", length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.set(ylim=(len(rows) - 0.5, -0.5), xlim=(0, end))
    below.set_xlabel("ms from the step's begin")
    from matplotlib.patches import Patch

    patches = [
        Patch(facecolor=colours[doing], alpha=_alpha(doing, colours), label=text)
        for doing, text in _SHOWN.items()
        if doing in used
    ]
    ncols = 4 if points > 500 else 3
    figure.legend(handles=patches, loc="outside lower left", ncols=ncols, frameon=False, fontsize=9)


def _rows(axes: Axes, rows: Sequence[Sequence[Span]], colours: Mapping[str, str], pixel: float) -> dict[str, None]:
    """Draw a row for each rank; passes have their microbatch's number where there is room. Returns what was drawn."""
    used: dict[str, None] = {}
    for row, spans in enumerate(rows):
        for span in spans:
            took, used[span.doing] = span.end_ms - span.start_ms, None
            high = 0.7 if span.doing in ("forward", "backward") else 0.4
            colour, alpha = colours[span.doing], _alpha(span.doing, colours)
            axes.broken_barh([(span.start_ms, took)], (row - high / 2, high), color=colour, alpha=alpha, lw=0)
            if high > 0.5 and took > 10 * pixel:
                axes.plot([span.end_ms] * 2, [row - high / 2, row + high / 2], color="white", lw=0.6)
                text = str(span.microbatch) + "′" * span.chunk
                ink = colours["on backward" if span.doing == "backward" else "ink"]
                axes.text(span.start_ms + took / 2, row, text, color=ink, fontsize=8, ha="center", va="center")
    return used


def _alpha(doing: Doing, colours: Mapping[str, str]) -> float:
    return _FAINT if doing == "forward" and colours["forward"] == colours["backward"] else 1.0
