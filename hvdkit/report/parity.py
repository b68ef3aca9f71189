"""Parity as tables, for terminals and for Markdown, from one list of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdkit.report import tabular
from hvdkit.results.parity import FrameworkParity, Parity

if TYPE_CHECKING:
    from rich.table import Table

_CHECKS = {
    "logits_f64": "logits",
    "gradients_f64": "gradients, worst tensor",
    "applied_f64": "applied gradient against the ranks' mean",
    "buffers_f64": "running statistics after one step",
    "weights_f64": "weights after one step",
    "losses_f64": "first five losses, free-running",
    "step_f64": "each step from the reference's state",
    "evaluation_f64": "evaluation: logits, loss, count",
}


def parity_table(parity: Parity) -> Table:
    """For the terminal: a row a check, a column a framework; what misses its mark is red."""
    from rich import box  # a report has no need of it
    from rich.table import Table
    from rich.text import Text

    table = Table(title=_title(parity), box=box.SIMPLE_HEAD)
    table.add_column("relative error", no_wrap=True)
    table.add_column("mark", justify="right", no_wrap=True)
    for name, each in parity.frameworks.items():
        table.add_column(f"{name} {each.version}", justify="right")
    for key, label, mark, cells in _rows(parity):
        marked = [
            Text(cell, "red" if key in each.missed else "") for cell, each in zip(cells, _all(parity), strict=True)
        ]
        table.add_row(label, mark, *marked)
    return table


def parity_markdown(parity: Parity) -> str:
    """`parity.md`: the table, and what one must know to judge it."""
    titles = ["relative error", "mark", *(f"{name} {each.version}" for name, each in parity.frameworks.items())]
    lines = [
        f"# {_title(parity)}: {'passed' if parity.passed else 'NOT PASSED'}",
        "",
        "| " + " | ".join(titles) + " |",
        "|:---" + "|---:" * (len(titles) - 1) + "|",
    ]
    for key, label, mark, cells in _rows(parity):
        shown = [f"**{cell}**" if key in each.missed else cell for cell, each in zip(cells, _all(parity), strict=True)]
        lines.append("| " + " | ".join([label, mark, *shown]) + " |")
    if not parity.passed:
        lines += ["", *(f"- {line}" for line in deviations(parity))]
    machine = parity.machine
    factors = ", ".join(f"{name} {each.f32_factor:g}" for name, each in parity.frameworks.items())
    lines += [
        "",
        f"Reference: {parity.reference}. Error of an array: ‖a − reference‖ / ‖reference‖, the worst over all tensors. "
        f"float64 but for the last two rows, where float32 is held against the reference's float64 and may be as many "
        f"times as far off as the reference's own float32 as the mark says ({factors}). {parity.np} ranks, "
        f"{parity.batch_size} images each, {parity.steps} steps, optimizer {parity.optimizer}, seed {parity.seed}.",
        "",
        f"{machine.processor}, {machine.cores} cores, {machine.system}.",
    ]
    return "\n".join(lines) + "\n"


def parity_cells(parity: Parity) -> tabular.Table:
    """For the report: the same rows; what misses its mark stands out."""
    table = tabular.Table("parity-table", ["relative error", "mark", *parity.frameworks], [])
    for key, label, mark, cells in _rows(parity):
        found = [tabular.Cell(cell, bad=key in each.missed) for cell, each in zip(cells, _all(parity), strict=True)]
        table.rows.append([tabular.Cell(label), tabular.Cell(mark), *found])
    return table


def deviations(parity: Parity) -> list[str]:
    """A line for each framework that deviates: where first, and what it looks like."""
    return [
        f"{name}: missed {', '.join(each.missed)}"
        + (f"; deviates first in {each.first_deviation}. Likely: {each.likely_cause}." if each.first_deviation else ".")
        for name, each in parity.frameworks.items()
        if not each.passed
    ]


def verdict(parity: Parity | None, framework: str) -> str:
    """One framework's cell in another table: its largest error over all steps, where it has passed every mark."""
    if parity is None or framework not in parity.frameworks:
        return "not checked"
    each = parity.frameworks[framework]
    return f"{each.step_f64:.0e}" if each.passed else "FAILED"


def _title(parity: Parity) -> str:
    return f"{parity.recipe}: parity with {parity.reference}, {parity.model}, {parity.np} ranks, {parity.steps} steps"


def _all(parity: Parity) -> list[FrameworkParity]:
    return list(parity.frameworks.values())


def _rows(parity: Parity) -> list[tuple[str, str, str, list[str]]]:
    """(key, label, mark, a cell a framework)."""
    rows = [
        (key, label, "bits", ["equal" if getattr(each, key) else "DIFFER" for each in _all(parity)])
        for key, label in (("batches_equal", "batches"), ("initial_weights_equal", "initial weights"))
    ]
    for key, label in _CHECKS.items():
        cells = [f"{getattr(each, key):.1e}" for each in _all(parity)]
        rows.append((key, label, f"{parity.marks[key]:.0e}", cells))
    for key, label in (("logits_f32", "logits in float32"), ("gradients_f32", "gradients in float32, worst tensor")):
        own = getattr(_all(parity)[0], f"reference_{key}")
        factors = sorted({each.f32_factor for each in _all(parity)})
        mark = f"{' or '.join(f'{factor:g}' for factor in factors)} × {own:.1e}"
        errors = [getattr(each, key) for each in _all(parity)]
        cells = [f"{error:.1e} ({error / own:.1f} ×)" if own else f"{error:.1e}" for error in errors]
        rows.append((key, label, mark, cells))
    return rows
