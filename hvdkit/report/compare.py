"""The tables of `hvdkit compare`, for terminals and for `compare.md`."""

from __future__ import annotations

from rich.table import Table as RichTable

from hvdkit.report.collect import Run
from hvdkit.report.documents import render
from hvdkit.report.findings import above_one, legend
from hvdkit.report.parity import deviations, reference
from hvdkit.report.rounds import RunGroup, by_kind
from hvdkit.report.tables import baseline_table, groups_table, ratios_table
from hvdkit.report.tabular import on_hosts, terminal
from hvdkit.results.compare import Comparison

_RATIOS = "hvdkit ÷ the rivals, and scaling efficiency, by rounds"


def comparison_tables(comparison: Comparison) -> list[RichTable]:
    """For the terminal."""
    first = comparison.runs[0]
    hosts = max(comparison.runs, key=lambda run: run.np).hosts
    places = f"; ranks {on_hosts(hosts)}" if len(set(hosts)) > 1 else ""
    title = f"{first.recipe}: {first.model}, {first.batch} per rank{places}"
    tables = [terminal(groups_table(_groups(comparison), comparison, "terminal"), title)]
    if comparison.ratios and (comparison.rounds > 1 or any(not ratio.of_scaling for ratio in comparison.ratios)):
        tables.append(terminal(ratios_table(comparison.ratios), _RATIOS))
    if comparison.baseline is not None:
        tables.append(terminal(baseline_table(comparison.baseline), _against(comparison)))
    return tables


def comparison_markdown(comparison: Comparison) -> str:
    """`compare.md`: the tables, and what one must know to judge them."""
    parity = comparison.parity
    return render(
        "compare.md",
        comparison=comparison,
        main=groups_table(_groups(comparison), comparison, "markdown"),
        titles={"ratios": _RATIOS, "baseline": _against(comparison)},
        ratios=ratios_table(comparison.ratios),
        baseline=baseline_table(comparison.baseline or []),
        deviations=deviations(parity) if parity else [],
        reference=reference(parity) if parity else "",
        notes=above_one(_groups(comparison)),
        legend=legend(_groups(comparison), comparison),
        hosts=on_hosts(max(comparison.runs, key=lambda run: run.np).hosts),
    )


def _groups(comparison: Comparison) -> list[RunGroup]:
    return list(by_kind(map(Run, comparison.runs)).values())


def _against(comparison: Comparison) -> str:
    return f"{comparison.runs[0].unit} per second, now ÷ the earlier comparison"
