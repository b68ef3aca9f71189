"""The tables of `hvdkit compare`, for terminals and for `compare.md`."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rich.table import Table as RichTable

from hvdkit.baselines.registry import label
from hvdkit.report.collect import Run
from hvdkit.report.parity import deviations, verdict
from hvdkit.report.rounds import Group, by_kind, efficiency
from hvdkit.report.tabular import Table, markdown, terminal
from hvdkit.results.compare import BaselineRow, Comparison, Ratio

_RATIOS = "hvdkit ÷ its rivals, and scaling efficiency, by rounds"
_BASELINE = "images per second, now ÷ the baseline"
_PAPER_ONLY = {"CPU an image", "start-up"}  # columns that a terminal has no room for


def comparison_tables(comparison: Comparison) -> list[RichTable]:
    """For the terminal."""
    first = comparison.runs[0]
    title = f"{first.recipe}: {first.model}, {first.batch_size} images a rank"
    tables = [terminal(_main(comparison, leave_out=_PAPER_ONLY), title)]
    if comparison.ratios and (comparison.rounds > 1 or any(ratio.against != "np=1" for ratio in comparison.ratios)):
        tables.append(terminal(_ratios(comparison.ratios), _RATIOS))
    if comparison.baseline is not None:
        tables.append(terminal(_baseline(comparison.baseline), _BASELINE))
    return tables


def comparison_markdown(comparison: Comparison) -> str:
    """`compare.md`: the tables, and what one must know to judge them."""
    first, machine = comparison.runs[0], comparison.machine
    rounds = "One run each."
    if comparison.rounds > 1:
        rounds = f"Medians of {comparison.rounds} rounds, all kinds of runs in random order in each."
    lines = [
        f"# {first.recipe}: {first.model}, {first.batch_size} images a rank, {first.threads} thread(s) a rank",
        "",
        *markdown(_main(comparison)),
        "",
        f"{rounds} Images per second count all ranks over the steps after the warm-up; a step lasts "
        "as long as on its slowest rank. Efficiency is images per second over ranks × those of one rank. CPU an image "
        "is that of all ranks. Start-up is from the command's start to the end of the first step. Peak memory is the "
        "largest rank's. Others' load is the share of the machine's CPU time that other processes had; beyond a tenth "
        "a run is noisy. Where rows say none for parity, gradients are not averaged, and nothing is proved.",
        "",
    ]
    if comparison.ratios:
        lines += [f"## {_RATIOS}", "", *markdown(_ratios(comparison.ratios)), "", _confidence(comparison), ""]
    if comparison.baseline is not None:
        lines += [f"## {_BASELINE}", "", *markdown(_baseline(comparison.baseline)), ""]
    lines += [
        *_parity_lines(comparison),
        f"{machine.processor}, {machine.cores} cores, {machine.memory_mib} MiB, {machine.system}; "
        f"Horovod {first.horovod_version}, launcher {first.launcher}, device {first.device}; "
        f"{first.epochs} epochs, seed {first.seed}.",
    ]
    return "\n".join(lines) + "\n"


def _main(comparison: Comparison, leave_out: Collection[str] = ()) -> Table:
    """A row for each group of runs, with medians over its rounds. A column without any value is left out too."""
    groups = list(by_kind(map(Run, comparison.runs)).values())
    columns: dict[str, Callable[[Group], str]] = {
        "framework": lambda group: f"{group.framework} {group.first.framework_version}",
        "rival": lambda group: group.rival or "",
        "ranks": lambda group: str(group.np),
        "images/s": lambda group: _number(group.middle("images_per_second")),
        "efficiency": lambda group: _percent(found.middle if (found := efficiency(group, groups)) else None),
        "step p50": lambda group: _number(group.middle("step_ms_p50"), " ms"),
        "step p90": lambda group: _number(group.middle("step_ms_p90"), " ms"),
        "CPU an image": lambda group: _number(group.middle("cpu_s_per_image"), " ms", 2, 1e3),
        "start-up": lambda group: _number(group.middle("startup_s"), " s"),
        "accuracy": lambda group: _percent(group.middle("val_accuracy"), 2),
        "peak memory": lambda group: _number(group.middle("peak_rss_mib"), " MiB", 0),
        "others' load": _load,
        "parity": lambda group: "none" if group.rival == "independent" else verdict(comparison.parity, group.label),
    }
    shown = {name: cell for name, cell in columns.items() if name not in leave_out}
    return Table.of("", groups, shown).without_empty(shown)


def _ratios(ratios: list[Ratio]) -> Table:
    columns: dict[str, Callable[[Ratio], str]] = {
        "framework": lambda ratio: ratio.framework,
        "ranks": lambda ratio: str(ratio.np),
        "against": lambda ratio: "one rank" if ratio.against == "np=1" else ratio.against,
        "median": lambda ratio: f"{ratio.median:.3f}",
        "interval": lambda ratio: f"{ratio.low:.3f}–{ratio.high:.3f}",
        "rounds": lambda ratio: str(ratio.rounds),
        "verdict": lambda ratio: ratio.verdict or "",
    }
    return Table.of("", ratios, columns)


def _baseline(rows: list[BaselineRow]) -> Table:
    columns: dict[str, Callable[[BaselineRow], str]] = {
        "framework": lambda row: label(row.framework, row.rival),
        "ranks": lambda row: str(row.np),
        "median": lambda row: f"{row.median:.3f}",
        "interval": lambda row: f"{row.low:.3f}–{row.high:.3f}",
        "rounds": lambda row: f"{row.rounds} ÷ {row.old_rounds}",
        "verdict": lambda row: row.verdict,
    }
    return Table.of("", rows, columns)


def _confidence(comparison: Comparison) -> str:
    sure = min(ratio.confidence for ratio in comparison.ratios)
    text = "Each ratio is of two runs of one round; the median over the rounds and its bootstrap interval. "
    text += "A tie is where the interval touches 0.99 to 1.01."
    if sure < 0.95:
        text += f" So few rounds make intervals of {100 * sure:.0f} % confidence at most; 6 or more make 95 %."
    return text


def _parity_lines(comparison: Comparison) -> list[str]:
    parity = comparison.parity
    if parity is None:
        return ["Parity: not checked, so whether all did the same work is not known.", ""]
    return [
        f"Parity: the largest relative error of any weight, running statistic or optimizer slot against "
        f"{parity.reference} in float64, over {parity.steps} steps from the same states at {parity.np} ranks "
        f"({parity.batch_size} images each); FAILED where any of {len(parity.marks) + 4} marks is missed.",
        *(f"- {line}" for line in deviations(parity)),
        "",
    ]


def _load(group: Group) -> str:
    load, noisy = group.middle("load"), sum(run.result.noisy for run in group.runs)
    if load is None:
        return "-"
    return _percent(load) + (f", {noisy} of {len(group.runs)} noisy" if noisy else "")


def _number(value: float | None, unit: str = "", digits: int = 1, factor: float = 1) -> str:
    return "-" if value is None else f"{factor * value:.{digits}f}{unit}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"
