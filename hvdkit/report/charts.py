"""The charts of speed, memory, scaling, step times and learning."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdkit.report import svg
from hvdkit.report.canvas import Canvas, Chart, Look, brief, drawing, finished, label_rows, legend, ranks, whole_numbers
from hvdkit.report.rounds import Estimate, Group, efficiency, interval
from hvdkit.report.tabular import Cell, Table, number, percent
from hvdkit.results.train import MetricLine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.axes import Axes

_MOST_POINTS = 400  # of a line
_PERCENTILES = (5, 25, 50, 75, 90, 95, 99)
_FAINT = 0.45  # opacity of rivals


class Charts:
    """Draws the charts of groups of runs, all with the same look."""

    def __init__(self, groups: list[Group]) -> None:
        self.groups = groups
        rivals = dict.fromkeys(group.rival for group in groups if group.rival)
        self.look = Look(list(dict.fromkeys(group.framework for group in groups)), list(rivals))
        self._nps = sorted({group.np for group in groups})

    def speed(self) -> Chart:
        """Images per second of each group, with its rounds and its interval."""
        best = max(self.groups, key=lambda group: group.speed.middle)
        return self._bars(
            "speed",
            "Throughput",
            "images/s",
            "images_per_second",
            f"Images per second, all ranks together. The most: {best.label} at {ranks(best.np)}, "
            f"{best.speed.text()} images/s.",
        )

    def memory(self) -> Chart:
        """Peak memory of the largest rank."""
        most = max(self.groups, key=lambda group: max(group.values("peak_rss_mib")))
        return self._bars(
            "memory",
            "Peak memory of the largest rank",
            "MiB",
            "peak_rss_mib",
            f"Peak resident memory in MiB. The most: {most.label} at {ranks(most.np)}, "
            f"{max(most.values('peak_rss_mib')):,.0f} MiB.",
            digits=0,
        )

    def extra(self) -> list[Chart]:
        """CPU time per image and start-up time, if they were measured."""
        wanted = [
            ("cpu", "Processor time an image, all ranks", "ms", "cpu_s_per_image", 1e3),
            ("startup", "From start to first step", "s", "startup_s", 1.0),
        ]
        charts = []
        for key, title, unit, name, factor in wanted:
            if any(group.values(name) for group in self.groups):
                charts.append(self._bars(key, title, unit, name, f"{title}, in {unit}.", factor=factor))
        return charts

    def course(self) -> Chart | None:
        """Images per second over the steps of a single run; None if it has no metric lines."""
        group = self.groups[0]
        lines = [line for line in group.runs[0].lines if not line.ends_epoch]
        if not lines:
            return None
        thinned = _thinned(lines)
        table = Table("course", ["step", "images/s"], [])
        with drawing(240) as canvas:
            axes = canvas.figure.subplots()
            style = self.look.line(group.label)
            axes.plot([line.step for line in thinned], [line.images_per_second for line in thinned], **style)
            axes.axhline(group.speed.middle, color=svg.MUTED, lw=0.9, ls=(0, (1, 2)))
            for line in thinned:
                text = f"step {line.step}: {line.images_per_second:,.1f} images/s"
                canvas.point(axes, line.step, line.images_per_second, text)
                table.rows.append([number(line.step), number(line.images_per_second, 1)])
            axes.set(xlabel="step", ylabel="images/s")
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)
            axes.grid(axis="y")
            summary = f"Images per second along the run; {group.speed.text()} over the steps after the warm-up."
            note = "By rank 0's clock; dotted: over all measured steps."
            return finished(canvas, "course", "Throughput along the run", summary, table, note)

    def _bars(
        self, key: str, title: str, unit: str, name: str, summary: str, digits: int = 1, factor: float = 1.0
    ) -> Chart:
        shown = [group for group in self.groups if group.values(name)]
        table = Table(key, ["framework", "ranks", "n", unit, "low", "high"], [])
        with drawing(44 + 21 * len(shown) + 26 * len({group.np for group in shown})) as canvas:
            largest = factor * max(max(group.values(name)) for group in shown)
            for axes, members in self._panels(canvas, shown):
                for row, group in enumerate(members):
                    values = [factor * value for value in group.values(name)]
                    found = interval(group.values(name)).times(factor)
                    colour = self.look.colour(group.framework)
                    axes.barh(row, found.middle, height=0.62, color=svg.SURFACE)  # hides the grid below a faint bar
                    axes.barh(row, found.middle, height=0.62, color=colour, alpha=_FAINT if group.rival else 1)
                    if found.low is not None and found.high is not None:
                        axes.plot([found.low, found.high], [row, row], color=svg.INK, lw=1.6, solid_capstyle="butt")
                        axes.plot(values, [row] * len(values), "o", ms=3.2, mfc=svg.SURFACE, mec=svg.INK, mew=0.8)
                    end = max([found.middle, *values]) + 0.022 * largest
                    axes.text(end, row, f"{found.middle:,.{digits}f}", va="center", fontsize=11)
                    for place in (found.middle / 2, found.middle):
                        canvas.point(axes, place, row, _described(group, found, digits, unit))
                    table.rows.append(_interval_row(group, found, digits))
                axes.set_xlim(0, 1.19 * largest)
            axes.set_xlabel(unit)
            return finished(canvas, key, title, summary, table)

    def _panels(self, canvas: Canvas, groups: list[Group]) -> Iterator[tuple[Axes, list[Group]]]:
        """A panel for each number of ranks, with a row for each group."""
        members = {np: [group for group in groups if group.np == np] for np in self._nps}
        members = {np: rows for np, rows in members.items() if rows}
        panels = canvas.figure.subplots(
            len(members), 1, sharex=True, squeeze=False, height_ratios=[len(rows) for rows in members.values()]
        )
        for axes, (np, rows) in zip(panels[:, 0], members.items(), strict=True):
            axes.set_title(ranks(np))
            label_rows(axes, [brief(group.label) for group in rows])
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
            yield axes, rows

    def scaling(self) -> list[Chart]:
        """Throughput and efficiency by number of ranks; empty if there is only one."""
        found = [efficiency(group, self.groups) for group in self.groups if group.np > 1]
        if len(self._nps) < 2 or not any(found):
            return []
        lines: list[tuple[str, str, str, Callable[[Group], Estimate | None]]] = [
            ("scaling", "Scaling", "images/s", lambda group: group.speed),
            ("efficiency", "Scaling efficiency", "%", lambda group: efficiency(group, self.groups)),
        ]
        return [self._by_ranks(*line) for line in lines]

    def _by_ranks(self, key: str, title: str, unit: str, value: Callable[[Group], Estimate | None]) -> Chart:
        table = Table(key, ["framework", "ranks", "n", unit, "low", "high"], [])
        worst: tuple[float, str] = (math.inf, "")
        with drawing(265) as canvas:
            axes = canvas.figure.subplots()
            names = list(dict.fromkeys(group.label for group in self.groups))
            factor = 100 if unit == "%" else 1
            for order, name in enumerate(names):
                members = [group for group in self.groups if group.label == name]
                known = [(group, found.times(factor)) for group in members if (found := value(group))]
                if not known:
                    continue
                shift = 1.022 ** (order - (len(names) - 1) / 2)  # so that intervals do not cover each other
                places = [group.np * shift for group, _ in known]
                middles = [found.middle for _, found in known]
                style = self.look.line(name)
                axes.plot(places, middles, **style, label=brief(name))
                for place, (group, found) in zip(places, known, strict=True):
                    if found.low is not None and found.high is not None:
                        axes.plot([place, place], [found.low, found.high], color=style["color"], lw=1.4)
                    canvas.point(axes, place, found.middle, _described(group, found, 1, unit))
                    table.rows.append(_interval_row(group, found, 1))
                    if group.np == self._nps[-1]:
                        worst = min(worst, (found.middle, f"{group.label} {found.text()} {unit}"))
                if unit != "%" and known[0][0].np == 1:
                    ideal = [middles[0] * place for place in places]
                    axes.plot(places, ideal, color=style["color"], lw=0.9, ls=(0, (1, 2)), zorder=1)
            if unit == "%":
                axes.axhline(100, color=svg.MUTED, lw=0.9, ls=(0, (1, 2)))
            axes.set_xscale("log", base=2)
            axes.set_xticks(self._nps, [str(np) for np in self._nps])
            axes.minorticks_off()
            axes.set(xlabel="ranks", ylabel=unit)
            axes.set_ylim(0, None if unit != "%" else max(112, axes.get_ylim()[1]))
            axes.grid(axis="y")
            legend(canvas, axes)
            summary = f"{title} from {ranks(self._nps[0])} to {ranks(self._nps[-1])}; the lowest there: {worst[1]}."
            note = "Dotted: as many times one rank's as there are ranks." if unit != "%" else "Dotted: 100 %."
            return finished(canvas, key, title, summary, table, note)

    def steps(self) -> Chart:
        """Step times: their distribution if the steps were kept, else the median and the 90th percentile."""
        import numpy

        kept, longest = any(group.steps for group in self.groups), 0.0
        table = Table("steps", ["framework", "ranks", "steps", *(f"p{part}" for part in _PERCENTILES)], [])
        with drawing(44 + 21 * len(self.groups) + 26 * len(self._nps)) as canvas:
            for axes, members in self._panels(canvas, self.groups):
                for row, group in enumerate(members):
                    colour = self.look.colour(group.framework)
                    medians = {part: group.middle(f"step_ms_p{part}") for part in (50, 90, 99)}
                    parts = {part: value for part, value in medians.items() if value is not None}
                    count = sum(run.result.measured_steps for run in group.runs)
                    if group.steps:
                        found = numpy.percentile(group.steps, _PERCENTILES).tolist()
                        parts = dict(zip(_PERCENTILES, found, strict=True))
                        count = len(group.steps)
                        axes.plot([parts[5], parts[95]], [row, row], color=colour, lw=1.6)
                        faint, width = _FAINT if group.rival else 0.8, parts[75] - parts[25]
                        axes.barh(row, width, height=0.56, left=parts[25], color=colour, alpha=faint)
                        axes.plot(parts[99], row, "|", color=colour, ms=8, mew=1.6)
                    else:
                        axes.plot([parts[50], parts[90]], [row, row], color=colour, lw=5, alpha=_FAINT)
                    axes.plot(parts[50], row, self.look.marker(group.framework), color=colour, mec=svg.SURFACE, ms=7)
                    shown = ", ".join(f"p{part} {parts[part]:.1f}" for part in parts if part in (5, 50, 90, 95, 99))
                    text = f"{group.label}, {ranks(group.np)}: {shown} ms over {count:,} steps"
                    longest = max(longest, *parts.values())
                    for part in parts:
                        canvas.point(axes, parts[part], row, text)
                    cells = [number(parts.get(part), 1) for part in _PERCENTILES]
                    table.rows.append([Cell(group.label), number(group.np), number(count), *cells])
                axes.set_xlim(0, 1.05 * longest)
            axes.set_xlabel("ms a step, on its slowest rank")
            slowest = max(self.groups, key=lambda group: max(group.values("step_ms_p90")))
            summary = (
                f"Duration of a step in ms. The longest 90th percentile: {slowest.label} at {ranks(slowest.np)}, "
                f"{max(slowest.values('step_ms_p90')):.1f} ms."
            )
            note = (
                "Mark: median; box: middle half; line: 5th to 95th percentile; tick: 99th."
                if kept
                else "Mark: median; bar: from there to the 90th percentile. The steps themselves were not kept."
            )
            return finished(canvas, "steps", "Step times", summary, table, note)

    def learning(self) -> list[Chart]:
        """Loss and accuracy by epoch: a chart for each number of ranks, with all frameworks."""
        return [chart for np in self._nps if (chart := self._learning(np))]

    def _learning(self, np: int) -> Chart | None:
        members = [group for group in self.groups if group.np == np and group.runs[0].lines]
        if not members:
            return None
        key, rated = f"learning-{np}", any(_rated(group) for group in members)
        columns = ["framework", "epoch", "training loss", "validation loss", "accuracy"]
        table = Table(key, columns, [])
        with drawing(330 if rated else 230) as canvas:
            panels = canvas.figure.subplots(2 if rated else 1, 1, sharex=True, squeeze=False)[:, 0]
            for group in members:
                style = self.look.line(group.label)
                lines = group.runs[0].lines
                within = [line for line in lines if not line.ends_epoch] or lines
                ends = _thinned([line for line in lines if line.ends_epoch])
                thinned = _thinned(within)
                places, losses = [_epoch(line, group) for line in thinned], [line.loss for line in thinned]
                panels[0].plot(places, losses, color=style["color"], ls=style["ls"], lw=1.4, label=brief(group.label))
                for place, line in zip(places, thinned, strict=True):
                    canvas.point(panels[0], place, line.loss, f"{group.label}, step {line.step}: loss {line.loss:.4f}")
                rates = [(line, line.val_accuracy) for line in ends if line.val_accuracy is not None]
                if rates:
                    shown = [_epoch(line, group) for line, _ in rates], [100 * rate for _, rate in rates]
                    panels[-1].plot(*shown, **style, clip_on=False, label=brief(group.label))
                for line, rate in rates:
                    text = f"{group.label}, epoch {line.epoch + 1}: accuracy {100 * rate:.2f} %"
                    canvas.point(panels[-1], _epoch(line, group), 100 * rate, text)
                table.rows.extend(_epoch_row(group, line) for line in ends)
            panels[0].set_ylim(bottom=0)
            panels[0].set_ylabel("training loss")
            panels[-1].set_xlabel("epoch")
            if rated:
                panels[-1].set(ylabel="accuracy, %", ylim=(0, 102))
            for axes in panels:
                axes.set_xlim(left=0)
                whole_numbers(axes)
                axes.grid(axis="y")
            legend(canvas, panels[-1] if rated else panels[0])
            final = "; ".join(
                f"{group.label} {100 * last:.2f} %"
                for group in members
                if (last := group.first.val_accuracy) is not None
            )
            summary = f"Training loss by epoch at {ranks(np)}." + (f" Accuracy at the end: {final}." if final else "")
            note = "The first round's curves." if any(len(group.runs) > 1 for group in members) else ""
            return finished(canvas, key, f"Loss and accuracy, {ranks(np)}", summary, table, note)


def _thinned(lines: list[MetricLine]) -> list[MetricLine]:
    """At most _MOST_POINTS lines, evenly spaced, and the last one."""
    kept = lines[:: max(1, math.ceil(len(lines) / _MOST_POINTS))]
    return kept if lines[-1:] == kept[-1:] else [*kept, lines[-1]]


def _interval_row(group: Group, found: Estimate, digits: int) -> list[Cell]:
    figures = [number(value, digits) for value in (found.middle, found.low, found.high)]
    return [Cell(group.label), number(group.np), number(found.n), *figures]


def _described(group: Group, found: Estimate, digits: int, unit: str) -> str:
    return f"{group.label}, {ranks(group.np)}: {found.text(digits)} {unit}, n = {found.n}"


def _epoch_row(group: Group, line: MetricLine) -> list[Cell]:
    figures = [number(line.epoch + 1), number(line.loss, 4), number(line.val_loss, 4), percent(line.val_accuracy, 2)]
    return [Cell(group.label), *figures]


def _epoch(line: MetricLine, group: Group) -> float:
    return line.step / max(1, line.total_steps) * group.first.epochs


def _rated(group: Group) -> bool:
    return any(line.val_accuracy is not None for line in group.runs[0].lines)
