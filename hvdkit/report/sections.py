"""The sections of the page, each with its charts and tables, or with the reason why it has none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hvdkit.report import canvas, proofs
from hvdkit.report.canvas import Chart, ranks
from hvdkit.report.charts import Charts
from hvdkit.report.collect import Found
from hvdkit.report.parallel import call_all
from hvdkit.report.parity import deviations, parity_table
from hvdkit.report.rounds import Group
from hvdkit.report.tables import baseline_table, runs_table, tuning_table
from hvdkit.report.tabular import Table
from hvdkit.results.compare import Comparison


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
    drawn = _charts(found, groups)
    if found.comparison is None:
        return [
            _course(drawn["course"]),
            Section("steps", "Step times", [], drawn["steps"]),
            _learning(drawn["learning"]),
            _tuning(found),
        ]
    return [
        _speed(found.comparison, groups, drawn),
        Section("steps", "Step times and memory", [], [*drawn["steps"], *drawn["memory"], *drawn["extra"]]),
        _learning(drawn["learning"]),
        _parity(found.comparison, drawn["parity"]),
        *_baseline(found.comparison),
        _tuning(found),
        Section("runs", "Every run", [], [], [runs_table(found)]),
    ]


def _charts(found: Found, groups: list[Group]) -> dict[str, list[Chart]]:
    """All charts, by what they show; those that take longest come first."""
    charts, comparison = Charts(groups), found.comparison
    wanted: dict[str, Callable[[], list[Chart]]] = {"learning": charts.learning, "steps": lambda: [charts.steps()]}
    if comparison is None:
        wanted["course"] = lambda: [*filter(None, [charts.course()])]
    else:
        wanted |= {
            "parity": lambda: proofs.parity(charts.look, comparison.parity) if comparison.parity else [],
            "extra": charts.extra,
            "scaling": charts.scaling,
            "memory": lambda: [charts.memory()],
            "speed": lambda: [charts.speed()],
            "ratios": lambda: [*filter(None, [proofs.ratios(charts.look, comparison.ratios)])],
        }
    canvas.load()
    return call_all(wanted)


def _course(course: list[Chart]) -> Section:
    text = [] if course else ["Its course is not known: the run has no metrics.jsonl that can be read."]
    return Section("throughput", "Throughput", text, course)


def _speed(comparison: Comparison, groups: list[Group], drawn: dict[str, list[Chart]]) -> Section:
    text = ["Bars: the median over the rounds; dots: the rounds; lines: the median's interval."]
    if all(len(group.runs) == 1 for group in groups):
        text = ["One run each: the figures have no intervals."]
    nps = sorted({group.np for group in groups})
    if not drawn["scaling"]:
        why = f"all was run at {ranks(nps[0])}" if len(nps) == 1 else "nothing was run at one rank to compare with"
        text.append(f"How it scales is not known: {why}.")
    charts = [*drawn["speed"], *drawn["ratios"], *drawn["scaling"]]
    return Section("throughput", "Throughput and scaling", text, charts)


def _learning(drawn: list[Chart]) -> Section:
    text = [] if drawn else ["Not known: no run has a metrics.jsonl that can be read."]
    return Section("learning", "Loss and accuracy", text, drawn)


def _parity(comparison: Comparison, charts: list[Chart]) -> Section:
    parity = comparison.parity
    if parity is None:
        text = [
            "Not asked for (--no-parity), so whether all did the same work is not known. `hvdkit parity` proves it."
        ]
        return Section("parity", "Parity", text)
    text = [
        f"Every framework computes the recipe in float64 from the same weights and images as {parity.reference}, "
        f"{parity.steps} steps at {ranks(parity.np)}. The table has the largest relative errors, beside the largest "
        f"that pass.",
        *deviations(parity),
    ]
    return Section("parity", "Parity", text, charts, [parity_table(parity, versions=False)])


def _baseline(comparison: Comparison) -> list[Section]:
    if comparison.baseline is None:
        return []
    text = (
        "Images per second over those of an earlier comparison. Worse or better: the whole interval is, by more than "
    )
    text += ", ".join(dict.fromkeys(f"{100 * row.margin:g} %" for row in comparison.baseline)) + "."
    return [Section("baseline", "Against the baseline", [text], [], [baseline_table(comparison.baseline)])]


def _tuning(found: Found) -> Section:
    table = tuning_table(found)
    text = [] if table else ["Nothing was tuned: every setting is the recipe's."]
    return Section("tuning", "Tuning", text, [], [table] if table else [])
