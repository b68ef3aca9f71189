"""The charts of the page: speed, memory, scaling, step times, learning and rivals."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from hvdkit.baselines.registry import label
from hvdkit.report import learning
from hvdkit.report.canvas import (
    INK,
    MUTED,
    SURFACE,
    Canvas,
    Chart,
    brief,
    drawing,
    fit,
    label_rows,
    ranks,
    series,
    whole_numbers,
)
from hvdkit.report.collect import CollectedRuns
from hvdkit.report.rounds import Estimate, RunGroup, efficiency, interval, unscaled
from hvdkit.report.tables import ratios_table
from hvdkit.report.tabular import Cell, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PERCENTILES = (5, 25, 50, 75, 90, 95, 99)
_FAINT = 0.45  # opacity of the rivals
_DOTS = (0, (1, 2))  # a dotted line
_MARKERS = "os^DvPX*"
_DASHES: list[Any] = ["-", "--", ":", "-."]


class Charts:
    """Draws the charts of groups of runs, all with the same look.

    A framework has the same colour and marker in every chart, a rival its own dashes. A method yields the charts for
    which there are data.
    """

    def __init__(self, page: CollectedRuns, groups: list[RunGroup]) -> None:
        self.groups, self._comparison = groups, page.comparison
        self._nps = sorted({group.np for group in groups})
        frameworks = dict.fromkeys(group.framework for group in groups)
        rivals = [None, *dict.fromkeys(group.rival for group in groups if group.rival)]
        self._looks = {
            label(framework, rival): (index, dashes)
            for index, framework in enumerate(frameworks)
            for rival, dashes in zip(rivals, itertools.cycle(_DASHES), strict=False)
        }
        self._unknown = len(frameworks), "-"

    def _line(self, name: str, **more: Any) -> dict[str, Any]:
        """Arguments of `plot` for a line with markers; `name` is a label of `registry.label`."""
        index, dashes = self._looks.get(name, self._unknown)
        marker = _MARKERS[index % len(_MARKERS)]
        return {"color": series(index), "mec": SURFACE, "marker": marker, "ls": dashes, "ms": 6.5, "lw": 1.8} | more

    def speed(self) -> Iterator[Chart]:
        """Images (or the task's other units) per second of each group, with its rounds and its interval."""
        yield self._bars(
            "speed", "Throughput, all ranks together", f"{self.groups[0].first.unit}/s", "images_per_second"
        )

    def memory(self) -> Iterator[Chart]:
        """Peak memory of the largest rank."""
        yield self._bars("memory", "Peak resident memory of the largest rank", "MiB", "peak_rss_mib", digits=0)

    def extra(self) -> Iterator[Chart]:
        """CPU time per image, or per 1,000 tokens, and start-up time, if they were measured."""
        of, factor = self.groups[0].first.cpu_of
        if any(group.values("cpu_s_per_image") for group in self.groups):
            yield self._bars("cpu", f"CPU time per {of}, all ranks", "ms", "cpu_s_per_image", factor=factor)
        if any(group.values("startup_s") for group in self.groups):
            yield self._bars("startup", "Start-up, to the end of the first step", "s", "startup_s")

    def course(self) -> Iterator[Chart]:
        """The speed and the bandwidth of collectives over the steps of a single run."""
        group = self.groups[0]
        lines = [line for line in group.runs[0].lines if not line.ends_epoch]
        unit, usual = f"{group.first.unit}/s", group.speed.middle
        speeds = [(line.step, line.images_per_second) for line in lines]
        summary = f"{unit} along the run; {group.speed.text()} over the steps after the warm-up."
        note = "By rank 0's clock. Dotted line: the speed over all measured steps."
        yield from self._along("course", "Throughput along the run", unit, speeds, usual, summary, note)
        rates = [(line.step, rate) for line in lines if (rate := line.communication_mbit_per_s) is not None]
        if rates:
            usual, lowest = statistics.median(rate for _, rate in rates), min(rate for _, rate in rates)
            title, unit = "Bandwidth of collectives along the run", "Mbit/s"
            summary = f"Bus bandwidth of collectives along the run: median {usual:,.1f} Mbit/s, lowest {lowest:,.1f}."
            note = "Collectives of at least 64 KiB. Dotted line: the median."
            yield from self._along("communication", title, unit, rates, usual, summary, note)

    def _along(
        self, key: str, title: str, unit: str, values: list[tuple[int, float]], usual: float, summary: str, note: str
    ) -> Iterator[Chart]:
        """A line of `values`, pairs of a step and a figure, if there are two of them."""
        if len(values) < 2:
            return
        with drawing(240, key, title, ["step", unit]) as canvas:
            axes = canvas.figure.subplots()
            axes.plot(*zip(*values, strict=True), **self._line(self.groups[0].label))
            axes.axhline(usual, color=MUTED, lw=0.9, ls=_DOTS)
            canvas.table.rows.extend([number(step), number(value, 1)] for step, value in values)
            axes.set(xlabel="step", ylabel=unit)
            axes.set_xlim(left=0)
            figures = [usual, *(value for _, value in values)]
            fit(axes, figures, 0.2 * max(figures))
            whole_numbers(axes)
            yield canvas.chart(summary, note)

    def _bars(self, key: str, title: str, unit: str, name: str, digits: int = 1, factor: float = 1.0) -> Chart:
        shown = [group for group in self.groups if group.values(name)]
        height = 44 + 21 * len(shown) + 26 * len({group.np for group in shown})
        with drawing(height, key, title, ["framework", "ranks", "n", unit, "low", "high"]) as canvas:
            largest = factor * max(max(group.values(name)) for group in shown)
            for axes, row, group in self._rows(canvas, shown):
                values = [factor * value for value in group.values(name)]
                estimate = interval(group.values(name)).times(factor)
                colour = self._line(group.label)["color"]
                axes.barh(row, estimate.middle, height=0.62, color=SURFACE)  # hides the grid below a faint bar
                axes.barh(row, estimate.middle, height=0.62, color=colour, alpha=_FAINT if group.rival else 1)
                if estimate.low is not None and estimate.high is not None:
                    axes.plot([estimate.low, estimate.high], [row, row], color=INK, lw=1.6, solid_capstyle="butt")
                    axes.plot(values, [row] * len(values), "o", ms=3.2, mfc=SURFACE, mec=INK, mew=0.8)
                end = max([estimate.middle, *values]) + 0.022 * largest
                axes.text(end, row, f"{estimate.middle:,.{digits}f}", va="center", fontsize=11)
                canvas.table.rows.append(_interval_row(group, estimate, digits))
            axes.set(xlim=(0, 1.19 * largest), xlabel=unit)
            most = max(shown, key=lambda group: group.middle(name) or 0.0)
            figure = interval(most.values(name)).times(factor).text(digits)
            return canvas.chart(f"{title}, in {unit}. The most: {most.label} at {ranks(most.np)}, {figure}.")

    def _rows(self, canvas: Canvas, groups: list[RunGroup]) -> Iterator[tuple[Axes, int, RunGroup]]:
        """A row for each group, in a panel for each number of ranks; all panels have the same x axis."""
        members = {np: rows for np in self._nps if (rows := [group for group in groups if group.np == np])}
        panels = canvas.figure.subplots(
            len(members), 1, sharex=True, squeeze=False, height_ratios=[len(rows) for rows in members.values()]
        )
        for axes, (np, rows) in zip(panels[:, 0], members.items(), strict=True):
            axes.set_title(ranks(np))
            label_rows(axes, [brief(group.label) for group in rows])
            axes.tick_params(axis="y", length=0)
            axes.spines["left"].set_visible(False)
            for row, group in enumerate(rows):
                yield axes, row, group

    def scaling(self) -> Iterator[Chart]:
        """Throughput and efficiency by number of ranks, if there are several."""
        bases = [unscaled(group, self.groups) for group in self.groups]
        if any(base and base is not group for base, group in zip(bases, self.groups, strict=True)):
            yield self._by_ranks("scaling", "Scaling", f"{self.groups[0].first.unit}/s", lambda group: group.speed)
            yield self._by_ranks("efficiency", "Scaling efficiency", "%", lambda group: efficiency(group, self.groups))

    def _by_ranks(self, key: str, title: str, unit: str, value: Callable[[RunGroup], Estimate | None]) -> Chart:
        worst: tuple[float, str] = (math.inf, "")
        with drawing(265, key, title, ["framework", "ranks", "n", unit, "low", "high"]) as canvas:
            axes = canvas.figure.subplots()
            names = list(dict.fromkeys(group.label for group in self.groups))
            factor = 100 if unit == "%" else 1
            for order, name in enumerate(names):
                members = [group for group in self.groups if group.label == name]
                known = [(group, estimate.times(factor)) for group in members if (estimate := value(group))]
                if not known:
                    continue
                shift = 1.022 ** (order - (len(names) - 1) / 2)  # so that intervals do not cover each other
                positions = [group.np * shift for group, _ in known]
                middles = [estimate.middle for _, estimate in known]
                style = self._line(name)
                axes.plot(positions, middles, **style, label=brief(name))
                for x, (group, estimate) in zip(positions, known, strict=True):
                    if estimate.low is not None and estimate.high is not None:
                        axes.plot([x, x], [estimate.low, estimate.high], color=style["color"], lw=1.4)
                    canvas.table.rows.append(_interval_row(group, estimate, 1))
                    if group.np == self._nps[-1]:
                        worst = min(worst, (estimate.middle, f"{group.label} {estimate.text()} {unit}"))
                if unit != "%" and known[0][0].np == 1:
                    ideal = [middles[0] * x for x in positions]
                    axes.plot(positions, ideal, color=style["color"], lw=0.9, ls=_DOTS, zorder=1)
            if unit == "%":
                axes.axhline(100, color=MUTED, lw=0.9, ls=_DOTS)
            axes.set_xscale("log", base=2)
            axes.set_xticks(self._nps, [str(np) for np in self._nps])
            axes.minorticks_off()
            axes.set(xlabel="ranks", ylabel=unit)
            low, high = axes.dataLim.intervaly  # with intervals and dotted lines
            fit(axes, [low, high], 10 if unit == "%" else 0.2 * high)
            axes.grid(axis="y")
            canvas.legend(axes)
            summary = f"{title} from {ranks(self._nps[0])} to {ranks(self._nps[-1])}; the lowest there: {worst[1]}."
            note = "Dotted: perfect scaling." if unit != "%" else "Dotted: 100 %."
            return canvas.chart(summary, note)

    def steps(self) -> Iterator[Chart]:
        """Step times: their distribution if the steps were kept, else the median and the 90th percentile.

        There is none where no run has two measured steps.
        """
        import numpy

        if all(run.result.measured_steps < 2 for group in self.groups for run in group.runs):
            return
        kept, longest = any(group.steps for group in self.groups), 0.0
        columns = ["framework", "ranks", "steps", *(f"p{percentile}" for percentile in _PERCENTILES)]
        height = 44 + 21 * len(self.groups) + 26 * len(self._nps)
        with drawing(height, "steps", "Distribution of the step times", columns) as canvas:
            for axes, row, group in self._rows(canvas, self.groups):
                style = self._line(group.label)
                colour = style["color"]
                medians = {percentile: group.middle(f"step_ms_p{percentile}") for percentile in (50, 90, 99)}
                percentiles = {percentile: value for percentile, value in medians.items() if value is not None}
                count = sum(run.result.measured_steps for run in group.runs)
                if group.steps:
                    percentiles = dict(
                        zip(_PERCENTILES, numpy.percentile(group.steps, _PERCENTILES).tolist(), strict=True)
                    )
                    count = len(group.steps)
                    axes.plot([percentiles[5], percentiles[95]], [row, row], color=colour, lw=1.6)
                    faint, width = _FAINT if group.rival else 0.8, percentiles[75] - percentiles[25]
                    axes.barh(row, width, height=0.56, left=percentiles[25], color=colour, alpha=faint)
                    axes.plot(percentiles[99], row, "|", color=colour, ms=8, mew=1.6)
                else:
                    axes.plot([percentiles[50], percentiles[90]], [row, row], color=colour, lw=5, alpha=_FAINT)
                axes.plot(percentiles[50], row, style["marker"], color=colour, mec=SURFACE, ms=7)
                longest = max(longest, *percentiles.values())
                cells = [number(percentiles.get(percentile), 1) for percentile in _PERCENTILES]
                canvas.table.rows.append([Cell(group.label), number(group.np), number(count), *cells])
            axes.set(xlim=(0, 1.05 * longest), xlabel="ms per step, on its slowest rank")
            slowest = max(self.groups, key=lambda group: max(group.values("step_ms_p90")))
            most = f"{slowest.label} at {ranks(slowest.np)}, {max(slowest.values('step_ms_p90')):.1f} ms"
            note = "Symbol: the median. Bar: up to the 90th percentile. The single steps were not kept."
            if kept:
                note = "Symbol: the median. Box: 25th to 75th percentile. Line: 5th to 95th. Tick: 99th."
            yield canvas.chart(f"Duration of a step in ms. The longest 90th percentile: {most}.", note)

    def learning(self) -> Iterator[Chart]:
        """Loss and accuracy by epoch: a chart for each number of ranks, with all frameworks.

        There is none where no run has two points to draw a line between, and no panel of accuracies after one epoch.
        """
        for np in self._nps:
            members = [group for group in self.groups if group.np == np and len(learning.loss_lines(group)) > 1]
            if members:
                yield learning.chart(np, members, self._line)

    def ratios(self) -> Iterator[Chart]:
        """Images per second over each rival's, with intervals, if one was measured."""
        ratios = self._comparison.ratios if self._comparison else []
        shown = [ratio for ratio in ratios if not ratio.of_scaling]
        if not shown:
            return
        with drawing(46 + 21 * len(shown), "ratios", "Compared with the rivals") as canvas:
            canvas.table = ratios_table(shown)
            axes = canvas.figure.subplots()
            for row, pair in enumerate(shown):
                style = self._line(pair.framework)
                axes.plot([pair.low, pair.high], [row, row], color=style["color"], lw=2.4)
                axes.plot(pair.median, row, style["marker"], color=style["color"], ms=7, mec=SURFACE)
            axes.axvline(1, color=MUTED, lw=1.2)
            label_rows(axes, [brief(f"{ratio.framework} {ratio.np}, {ratio.against}") for ratio in shown])
            axes.set_xlabel("speed ÷ the rival's (1: equal)")
            summary = [
                f"{ratio.framework} at {ranks(ratio.np)} against {ratio.against}: {ratio.median:.2f}, {ratio.shown}"
                for ratio in shown
            ]
            yield canvas.chart("; ".join(summary) + ".")


def _interval_row(group: RunGroup, estimate: Estimate, digits: int) -> list[Cell]:
    figures = [number(value, digits) for value in (estimate.middle, estimate.low, estimate.high)]
    return [Cell(group.label), number(group.np), number(estimate.n), *figures]
