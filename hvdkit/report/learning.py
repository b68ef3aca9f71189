"""The chart of a training's course: loss, accuracy and a task's own metrics by epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdkit.report.canvas import Chart, brief, drawing, fit, ranks, whole_numbers
from hvdkit.report.rounds import RunGroup, own_metrics, titled
from hvdkit.report.tabular import Cell, number, percent
from hvdkit.results.train import MetricLine

_MOST_METRICS = 6  # panels below the loss


def chart(np: int, members: list[RunGroup], look: Callable[[str], dict[str, Any]]) -> Chart:
    """The curves of groups with `np` ranks. `look` has the arguments of `plot` for the line of a group's label."""
    epochs = max(sum(line.ends_epoch for line in group.runs[0].lines) for group in members)
    rated = any(line.val_accuracy is not None for group in members for line in group.runs[0].lines)
    own = own_metrics(run for group in members for run in group.runs)
    # One point is no curve.
    shown_names = [*(["accuracy"] if rated else []), *own][: _MOST_METRICS if epochs > 1 else 0]
    accurate = rated or not own
    columns = ["framework", "epoch", "training loss", "validation loss", *(["accuracy"] if accurate else [])]
    columns += [titled(name) for name in own if name != "loss"]
    title = f"Loss and {'accuracy' if accurate else 'metrics'}, {ranks(np)}"
    with drawing(230 + 100 * len(shown_names), f"learning-{np}", title, columns) as canvas:
        panels = canvas.figure.subplots(1 + len(shown_names), 1, sharex=True, squeeze=False)[:, 0]
        for group in members:
            style = look(group.label)
            ends = [line for line in group.runs[0].lines if line.ends_epoch]
            within = loss_lines(group)
            at_epochs, losses = [_epoch(line, group) for line in within], [line.loss for line in within]
            marker = style["marker"] if len(within) < 10 else ""
            loss_style = {"color": style["color"], "ls": style["ls"], "marker": marker, "ms": 4, "lw": 1.4}
            panels[0].plot(at_epochs, losses, **loss_style, clip_on=False, label=brief(group.label))
            for axes, name in zip(panels[1:], shown_names, strict=True):
                factor = 100.0 if name == "accuracy" else 1.0
                scores = [(line, factor * score) for line in ends if (score := _score(line, name)) is not None]
                if scores:
                    at_epochs, values = [_epoch(line, group) for line, _ in scores], [score for _, score in scores]
                    axes.plot(at_epochs, values, **style, clip_on=False, label=brief(group.label))
            for line in ends:
                figures = [number(line.epoch + 1), number(line.loss, 4), number(line.val_loss, 4)]
                extra = [number(_score(line, name), 4) for name in own if name != "loss"]
                figures += [percent(line.val_accuracy, 2)] if accurate else []
                canvas.table.rows.append([Cell(group.label), *figures, *extra])
        low, high = panels[0].dataLim.intervaly
        fit(panels[0], [low, high], 0.2 * high)
        panels[0].set_ylabel("training loss")
        panels[-1].set_xlabel("epoch")
        for axes, name in zip(panels[1:], shown_names, strict=True):
            axes.set_ylabel("accuracy, %" if name == "accuracy" else titled(name))
            if name == "accuracy":
                fit(axes, axes.dataLim.intervaly, 2, 100.5)
        for axes in panels:
            axes.set_xlim(0, max(1.0, axes.get_xlim()[1]))
            whole_numbers(axes)
        canvas.legend(panels[-1])
        last = [(group.label, end) for group in members if (end := group.first.val_accuracy) is not None]
        final = "; ".join(f"{name} {100 * rate:.2f} %" for name, rate in last)
        summary = f"Training loss by epoch at {ranks(np)}." + (f" Accuracy at the end: {final}." if final else "")
        notes = ["Curves of the first round."] if any(group.runs[1:] for group in members) else []
        if final and not rated:
            notes.append(f"Evaluated once, at the end: {final}.")
        return canvas.chart(summary, " ".join(notes))


def loss_lines(group: RunGroup) -> list[MetricLine]:
    """The lines of the loss curve: the logged steps, with the ends of epochs if fewer than two steps were logged."""
    lines = group.runs[0].lines
    within = [line for line in lines if not line.ends_epoch]
    return within if len(within) > 1 else list({line.step: line for line in lines}.values())


def _score(line: MetricLine, name: str) -> float | None:
    return line.val_accuracy if name == "accuracy" else (line.validation or {}).get(name)


def _epoch(line: MetricLine, group: RunGroup) -> float:
    first = group.first
    total = first.steps if first.stopped_early else line.total_steps
    return line.step / max(1, total) * first.epochs
