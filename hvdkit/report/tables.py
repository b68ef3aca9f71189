"""Results as tables, for terminals and for Markdown, from one list of columns."""

from __future__ import annotations

from collections.abc import Callable

from rich import box
from rich.table import Table

from hvdkit.report.parity import deviations, verdict
from hvdkit.results import Comparison, TrainResult

Cell = Callable[[TrainResult, Comparison], str]

_COLUMNS: list[tuple[str, Cell]] = [
    ("framework", lambda run, _: f"{run.framework} {run.framework_version}"),
    ("ranks", lambda run, _: str(run.np)),
    ("images/s", lambda run, _: f"{run.images_per_second:.1f}"),
    ("efficiency", lambda run, comparison: _percent(efficiency(run, comparison))),
    ("step p50", lambda run, _: f"{run.step_ms_p50:.1f} ms"),
    ("step p90", lambda run, _: f"{run.step_ms_p90:.1f} ms"),
    ("accuracy", lambda run, _: _percent(run.val_accuracy, 2)),
    ("peak memory", lambda run, _: f"{run.peak_rss_mib:.0f} MiB"),
    ("parity", lambda run, comparison: verdict(comparison.parity, run.framework)),
]


def efficiency(run: TrainResult, comparison: Comparison) -> float | None:
    """Images per second, over those of the same framework's single rank times the number of ranks.

    A fraction of 1; None where no run has a single rank.
    """
    alone = [other for other in comparison.runs if other.framework == run.framework and other.np == 1]
    return run.images_per_second / (alone[0].images_per_second * run.np) if alone else None


def comparison_table(comparison: Comparison) -> Table:
    """For the terminal."""
    first = comparison.runs[0]
    table = Table(title=f"{first.recipe}: {first.model}, {first.batch_size} images a rank", box=box.SIMPLE_HEAD)
    for index, (title, _) in enumerate(_COLUMNS):
        table.add_column(title, justify="left" if index == 0 else "right", no_wrap=True)
    for row in _rows(comparison):
        table.add_row(*row)
    return table


def comparison_markdown(comparison: Comparison) -> str:
    """`compare.md`: the table, and what one must know to judge it."""
    first, machine = comparison.runs[0], comparison.machine
    titles = [title for title, _ in _COLUMNS]
    lines = [
        f"# {first.recipe}: {first.model}, {first.batch_size} images a rank, {first.threads} thread(s) a rank",
        "",
        "| " + " | ".join(titles) + " |",
        "|:---" + "|---:" * (len(titles) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in _rows(comparison)),
        "",
        "One run each. Images per second count all ranks over the steps after the warm-up; a step lasts as long as on "
        "its slowest rank. Efficiency is images per second over ranks × those of one rank. Peak memory is the largest "
        "rank's.",
        "",
        *_parity_lines(comparison),
        f"{machine.processor}, {machine.cores} cores, {machine.memory_mib} MiB, {machine.system}; "
        f"Horovod {first.horovod_version}, launcher {first.launcher}, device {first.device}; "
        f"{first.epochs} epochs, seed {first.seed}.",
    ]
    return "\n".join(lines) + "\n"


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
    return (
        f"{result.framework} {result.framework_version}, {result.np} rank(s): {result.images_per_second:.1f} images/s, "
        f"step {result.step_ms_p50:.1f} ms (p90 {result.step_ms_p90:.1f} ms), loss {result.train_loss:.4f}{accuracy}"
    )


def _rows(comparison: Comparison) -> list[list[str]]:
    return [[cell(run, comparison) for _, cell in _COLUMNS] for run in comparison.runs]


def _percent(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"
