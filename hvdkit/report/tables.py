"""Results as tables, for terminals and for Markdown, from one list of columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from statistics import median

from rich import box
from rich.table import Table

from hvdkit.baselines.registry import label
from hvdkit.report.parity import deviations, verdict
from hvdkit.results.compare import BaselineRow, Comparison, Ratio
from hvdkit.results.train import TrainResult


@dataclass(frozen=True)
class Kind:
    """The runs of one framework, number of ranks and rival: one a round."""

    runs: list[TrainResult]
    comparison: Comparison

    @property
    def first(self) -> TrainResult:
        """What does not change between rounds is the same in all."""
        return self.runs[0]

    def middle(self, figure: Callable[[TrainResult], float | None]) -> float | None:
        """The median over the rounds that have the figure."""
        values = [value for value in map(figure, self.runs) if value is not None]
        return median(values) if values else None


_COLUMNS: list[tuple[str, Callable[[Kind], str]]] = [
    ("framework", lambda kind: f"{kind.first.framework} {kind.first.framework_version}"),
    ("rival", lambda kind: kind.first.rival or ""),
    ("ranks", lambda kind: str(kind.first.np)),
    ("images/s", lambda kind: _number(kind.middle(lambda run: run.images_per_second))),
    ("efficiency", lambda kind: _percent(efficiency(kind))),
    ("step p50", lambda kind: _number(kind.middle(lambda run: run.step_ms_p50), " ms")),
    ("step p90", lambda kind: _number(kind.middle(lambda run: run.step_ms_p90), " ms")),
    ("CPU an image", lambda kind: _number(kind.middle(lambda run: _thousandfold(run.cpu_s_per_image)), " ms", 2)),
    ("start-up", lambda kind: _number(kind.middle(lambda run: run.startup_s), " s")),
    ("accuracy", lambda kind: _percent(kind.middle(lambda run: run.val_accuracy), 2)),
    ("peak memory", lambda kind: _number(kind.middle(lambda run: run.peak_rss_mib), " MiB", 0)),
    ("others' load", lambda kind: _load(kind)),
    ("parity", lambda kind: _parity(kind)),
]


_ON_PAPER = {"CPU an image", "start-up"}  # which a terminal has no room for


def kinds(comparison: Comparison) -> list[Kind]:
    """The comparison's runs by kind, in the order of their first round."""
    by_kind: dict[tuple[str, int, str | None], list[TrainResult]] = {}
    for run in comparison.runs:
        by_kind.setdefault((run.framework, run.np, run.rival), []).append(run)
    return [Kind(runs, comparison) for runs in by_kind.values()]


def efficiency(kind: Kind) -> float | None:
    """Images per second, over those of the same framework's and rival's single rank times the number of ranks.

    A fraction of 1, the median over rounds; None where no run has a single rank.
    """
    ratios = []
    for run in kind.runs:
        for other in kind.comparison.runs:
            same = (other.framework, other.rival, other.round) == (run.framework, run.rival, run.round)
            if same and other.np == 1:
                ratios.append(run.images_per_second / (other.images_per_second * run.np))
    return median(ratios) if ratios else None


def comparison_tables(comparison: Comparison) -> list[Table]:
    """For the terminal."""
    first = comparison.runs[0]
    title = f"{first.recipe}: {first.model}, {first.batch_size} images a rank"
    tables = [_table(title, *_main(comparison, leave_out=_ON_PAPER))]
    if comparison.ratios and (comparison.rounds > 1 or any(ratio.against != "np=1" for ratio in comparison.ratios)):
        tables.append(_table(_RATIOS, *_ratios(comparison.ratios)))
    if comparison.baseline is not None:
        tables.append(_table(_BASELINE, *_baseline(comparison.baseline)))
    return tables


def comparison_markdown(comparison: Comparison) -> str:
    """`compare.md`: the tables, and what one must know to judge them."""
    first, machine = comparison.runs[0], comparison.machine
    lines = [
        f"# {first.recipe}: {first.model}, {first.batch_size} images a rank, {first.threads} thread(s) a rank",
        "",
        *_markdown(*_main(comparison)),
        "",
        f"{_rounds_told(comparison)} Images per second count all ranks over the steps after the warm-up; a step lasts "
        "as long as on its slowest rank. Efficiency is images per second over ranks × those of one rank. CPU an image "
        "is that of all ranks. Start-up is from the command's start to the end of the first step. Peak memory is the "
        "largest rank's. Others' load is the share of the machine's CPU time that other processes had; beyond a tenth "
        "a run is noisy. Where rows say none for parity, gradients are not averaged, and nothing is proved.",
        "",
    ]
    if comparison.ratios:
        lines += [f"## {_RATIOS}", "", *_markdown(*_ratios(comparison.ratios)), "", _confidence_told(comparison), ""]
    if comparison.baseline is not None:
        lines += [f"## {_BASELINE}", "", *_markdown(*_baseline(comparison.baseline)), ""]
    lines += [
        *_parity_lines(comparison),
        f"{machine.processor}, {machine.cores} cores, {machine.memory_mib} MiB, {machine.system}; "
        f"Horovod {first.horovod_version}, launcher {first.launcher}, device {first.device}; "
        f"{first.epochs} epochs, seed {first.seed}.",
    ]
    return "\n".join(lines) + "\n"


_RATIOS = "hvdkit ÷ its rivals, and scaling efficiency, by rounds"
_BASELINE = "images per second, now ÷ the baseline"
Rows = list[list[str]]


def _main(comparison: Comparison, leave_out: Collection[str] = ()) -> tuple[list[str], Rows]:
    """Titles and rows; a column in which nobody has anything is left out too."""
    columns = [column for column in _COLUMNS if column[0] not in leave_out]
    rows = [[cell(kind) for _, cell in columns] for kind in kinds(comparison)]
    used = [index for index in range(len(columns)) if any(row[index] not in ("", "-") for row in rows)]
    return [columns[index][0] for index in used], [[row[index] for index in used] for row in rows]


def _ratios(ratios: Sequence[Ratio]) -> tuple[list[str], Rows]:
    titles = ["framework", "ranks", "against", "median", "interval", "rounds", "verdict"]
    return titles, [
        [
            ratio.framework,
            str(ratio.np),
            "one rank" if ratio.against == "np=1" else ratio.against,
            f"{ratio.median:.3f}",
            f"{ratio.low:.3f}–{ratio.high:.3f}",
            str(ratio.rounds),
            ratio.verdict or "",
        ]
        for ratio in ratios
    ]


def _baseline(rows: Sequence[BaselineRow]) -> tuple[list[str], Rows]:
    titles = ["framework", "ranks", "median", "interval", "rounds", "verdict"]
    return titles, [
        [
            label(row.framework, row.rival),
            str(row.np),
            f"{row.median:.3f}",
            f"{row.low:.3f}–{row.high:.3f}",
            f"{row.rounds} ÷ {row.old_rounds}",
            row.verdict,
        ]
        for row in rows
    ]


def _table(title: str, titles: list[str], rows: Rows) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    for index, each in enumerate(titles):
        table.add_column(each, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _markdown(titles: list[str], rows: Rows) -> list[str]:
    head = ["| " + " | ".join(titles) + " |", "|:---" + "|---:" * (len(titles) - 1) + "|"]
    return head + ["| " + " | ".join(row) + " |" for row in rows]


def _rounds_told(comparison: Comparison) -> str:
    if comparison.rounds == 1:
        return "One run each."
    return f"Medians of {comparison.rounds} rounds, all kinds of runs in random order in each."


def _confidence_told(comparison: Comparison) -> str:
    sure = min(ratio.confidence for ratio in comparison.ratios)
    told = "Each ratio is of two runs of one round; the median over the rounds and its bootstrap interval. "
    told += "A tie is where the interval touches 0.99 to 1.01. "
    if sure < 0.95:
        told += f"So few rounds make intervals of {100 * sure:.0f} % confidence at most; 6 or more make 95 %."
    return told.strip()


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


def result_lines(result: TrainResult) -> str:
    """One run, in a few words."""
    accuracy = "" if result.val_accuracy is None else f", validation accuracy {_percent(result.val_accuracy, 2)}"
    if result.corrupt_images:
        accuracy += f"\n{result.corrupt_images} corrupt image(s) replaced; the logs name them"
    by = f" by {result.rival}" if result.rival else ""
    return (
        f"{result.framework} {result.framework_version}{by}, {result.np} rank(s): "
        f"{result.images_per_second:.1f} images/s, "
        f"step {result.step_ms_p50:.1f} ms (p90 {result.step_ms_p90:.1f} ms), loss {result.train_loss:.4f}{accuracy}"
    )


def _parity(kind: Kind) -> str:
    if kind.first.rival == "independent":
        return "none"
    return verdict(kind.comparison.parity, label(kind.first.framework, kind.first.rival))


def _load(kind: Kind) -> str:
    load, noisy = kind.middle(lambda run: run.load), sum(run.noisy for run in kind.runs)
    if load is None:
        return "-"
    return _percent(load) + (f", {noisy} of {len(kind.runs)} noisy" if noisy else "")


def _thousandfold(value: float | None) -> float | None:
    return None if value is None else 1000 * value


def _number(value: float | None, unit: str = "", digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def _percent(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"
