"""The sections of the page, each with its charts and tables, or with the reason why it has none."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from hvdkit.report import canvas
from hvdkit.report.canvas import Chart, ranks
from hvdkit.report.charts import Charts
from hvdkit.report.collect import Found
from hvdkit.report.parallel import call_all
from hvdkit.report.parity import deviations, parity_table
from hvdkit.report.rounds import Group
from hvdkit.report.tables import baseline_table, runs_table, tuning_table
from hvdkit.report.tabular import Table

_OF_A_RUN = ("learning", "steps", "course")  # charts; those that take longest come first
_OF_A_COMPARISON = ("learning", "steps", "parity", "extra", "scaling", "memory", "speed", "ratios")


@dataclass(frozen=True)
class Section:
    """A section. `text` are its paragraphs; a section without charts and tables says why."""

    key: str
    title: str
    text: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)


def sections(found: Found, groups: list[Group]) -> list[Section]:
    """All sections, in order. A single run has no scaling, no parity and no list of runs."""
    drawn, comparison = _charts(found, groups), found.comparison
    text = [] if drawn["learning"] else ["Not known: no run has a metrics.jsonl that can be read."]
    learning = Section("learning", "Loss and accuracy", text, drawn["learning"])
    table = tuning_table(found)
    text = [] if table.rows else ["Nothing was tuned: every setting is the recipe's."]
    tuning = Section("tuning", "Tuning", text, [], [table] if table.rows else [])
    if comparison is None:
        course = drawn["course"]
        text = [] if course else ["Its course is not known: the run has no metrics.jsonl that can be read."]
        throughput = Section("throughput", "Throughput", text, course)
        return [throughput, Section("steps", "Step times", [], drawn["steps"]), learning, tuning]

    text = ["Bars: the median over the rounds; dots: the rounds; lines: the median's interval."]
    if all(len(group.runs) == 1 for group in groups):
        text = ["One run each: the figures have no intervals."]
    if not drawn["scaling"]:
        nps = {group.np for group in groups}
        why = f"all was run at {ranks(*nps)}" if len(nps) == 1 else "nothing was run at one rank to compare with"
        text.append(f"How it scales is not known: {why}.")
    charts = [*drawn["speed"], *drawn["ratios"], *drawn["scaling"]]
    throughput = Section("throughput", "Throughput and scaling", text, charts)
    charts = [*drawn["steps"], *drawn["memory"], *drawn["extra"]]
    made = [throughput, Section("steps", "Step times and memory", [], charts), learning]

    parity, tables = comparison.parity, []
    text = ["Not asked for (--no-parity), so whether all did the same work is not known. `hvdkit parity` proves it."]
    if parity is not None:
        text = [
            f"Every framework computes the recipe in float64 from the same weights and images as {parity.reference}, "
            f"{parity.steps} steps at {ranks(parity.np)}. The table has the largest relative errors, beside the "
            "largest that pass.",
            *deviations(parity),
        ]
        tables = [parity_table(parity, versions=False)]
    made.append(Section("parity", "Parity", text, drawn["parity"], tables))

    if comparison.baseline is not None:
        margins = ", ".join(dict.fromkeys(f"{100 * row.margin:g} %" for row in comparison.baseline))
        text = [
            "Images per second over those of an earlier comparison. Worse or better: the whole interval is, by more "
            f"than {margins}."
        ]
        made.append(Section("baseline", "Against the baseline", text, [], [baseline_table(comparison.baseline)]))
    return [*made, tuning, Section("runs", "Every run", [], [], [runs_table(found)])]


def _charts(found: Found, groups: list[Group]) -> dict[str, list[Chart]]:
    """All charts, by what they show."""
    charts = Charts(found, groups)

    def drawn(name: str) -> list[Chart]:
        return list(getattr(charts, name)())

    with canvas.drawing(1.0):
        pass  # loads matplotlib before a second process is forked to draw some of the charts
    names = _OF_A_RUN if found.comparison is None else _OF_A_COMPARISON
    return call_all({name: partial(drawn, name) for name in names})
