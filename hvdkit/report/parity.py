"""The result of `hvdkit parity` as a table, as `parity.md` and as `parity.png`."""

from __future__ import annotations

from pathlib import Path

from hvdkit.report import plotting
from hvdkit.report.documents import render
from hvdkit.report.tabular import Cell, Table, on_hosts
from hvdkit.results.parity import FrameworkParity, Parity

FLOOR, _CEILING = 1e-17, 10.0  # errors beyond are drawn here: a logarithmic axis has no 0
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


def title(parity: Parity) -> str:
    """The title of the table."""
    compared = f"parity with {reference(parity)}"
    return f"{parity.recipe}: {compared}, {parity.model}, {parity.np} ranks, {parity.steps} steps"


def reference(parity: Parity) -> str:
    """The name of the reference; in files of earlier versions it is not plain Horovod but hvdkit itself."""
    own = parity.frameworks.get(parity.reference)
    if parity.divided:
        parts = ", same microbatches" if parity.recipe_keys["parallel.pipeline"] > 1 else ""
        return f"{parity.reference} (each copy of the model on one rank{parts})"
    return parity.reference if own and own.step_f64 == 0 else f"{parity.reference} under plain Horovod"


def parity_table(parity: Parity, versions: bool = True) -> Table:
    """A row for each check, a column for each framework, with its version or not; errors above their limit are bad."""
    results = parity.frameworks
    names = [
        (f"{name} {result.version}" if versions else name) + (" in float32" if result.f32_excess else "")
        for name, result in results.items()
    ]
    table = Table("parity-table", ["relative error", "limit", *names], [])

    def add(key: str, label: str, limit: str, texts: list[str]) -> None:
        label = label.replace("logits", "cross-entropies") if parity.divided else label
        cells = [Cell(text, bad=key in result.missed) for text, result in zip(texts, results.values(), strict=True)]
        table.rows.append([Cell(label), Cell(limit), *cells])

    for key, label in (("batches_equal", "batches"), ("initial_weights_equal", "initial weights")):
        add(key, label, "bits", ["equal" if getattr(result, key) else "DIFFER" for result in results.values()])
    for key in parity.checks:
        add(key, _CHECKS[key], f"{parity.marks[key]:.0e}", [_shown(result, key) for result in results.values()])
    for key, label in (("logits_f32", "logits in float32"), ("gradients_f32", "gradients in float32, worst tensor")):
        own = getattr(next(iter(results.values())), f"reference_{key}")
        factors = " or ".join(f"{factor:g}" for factor in sorted({result.f32_factor for result in results.values()}))
        errors = [getattr(result, key) for result in results.values()]
        texts = [f"{error:.1e} ({error / own:.1f} ×)" if own else f"{error:.1e}" for error in errors]
        add(key, label, f"{factors} × {own:.1e}", texts)
    return table


def _shown(result: FrameworkParity, key: str) -> str:
    text = f"{getattr(result, key):.1e}"
    return text if result.f32_excess is None else f"{text} ({result.f32_excess[key]:.1g} × limit)"


def parity_markdown(parity: Parity) -> str:
    """`parity.md`: the table, and how to read it."""
    return render(
        "parity.md",
        parity=parity,
        hosts=f"; ranks: {on_hosts(parity.hosts)}" if parity.hosts else "",
        title=title(parity),
        reference=reference(parity),
        checks=parity_table(parity),
        deviations=deviations(parity),
        singles=[name for name, result in parity.frameworks.items() if result.f32_excess],
        factors=", ".join(f"{name} {result.f32_factor:g}" for name, result in parity.frameworks.items()),
    )


def deviations(parity: Parity) -> list[str]:
    """A line for each framework that did not pass: where it deviates first, and of what part of a step that is."""
    return [
        f"{name}: missed {', '.join(result.missed)}"
        + (f"; deviates first in {result.first_deviation}: {result.likely_cause}." if result.first_deviation else ".")
        for name, result in parity.frameworks.items()
        if not result.passed
    ]


def verdict(parity: Parity | None, framework: str) -> str:
    """One framework's cell in another table: its largest error over all steps if it passed every check."""
    if parity is None or framework not in parity.frameworks:
        return "not checked"
    proved = parity.frameworks[framework]
    if not proved.passed:
        return "FAILED"
    return f"{proved.step_f64:.0e}" if proved.f32_excess is None else "as in float32"


def clipped(error: float) -> float:
    """An error as it is drawn."""
    return max(FLOOR, min(error, _CEILING)) if error == error else _CEILING


def parity_plot(parity: Parity, path: Path) -> None:
    """Draw the errors of each framework by check, with the limits, by layer and by step; written to `path` as PNG.

    Those that trained in float32 alone are left out. Raises RunError if it cannot be written.
    """
    with plotting.picture(path, 12.5, 5) as figure:
        from matplotlib import ticker

        left, middle, right = figure.subplots(1, 3, width_ratios=(1.1, 1.4, 1))
        checks = parity.checks
        for index, (name, result) in enumerate(parity.in_float64.items()):
            heights = [row + 0.15 * (index - (len(parity.in_float64) - 1) / 2) for row in range(len(checks))]
            left.plot([clipped(getattr(result, key)) for key in checks], heights, "o", label=name, color=f"C{index}")
            place = {name: number for number, name in enumerate(result.gradient_errors_f64)}
            for errors, line in ((result.gradient_errors_f64, ".-"), (result.gradient_errors_f32, ".:")):
                places = [place[name] for name in errors]
                middle.plot(places, [*map(clipped, errors.values())], line, lw=0.6, ms=3, color=f"C{index}")
            steps = [*map(clipped, result.step_errors_f64)]
            right.plot(range(1, len(steps) + 1), steps, ".-", color=f"C{index}")
        for height, key in enumerate(checks):
            left.plot([parity.marks[key]] * 2, [height - 0.4, height + 0.4], color="black", lw=2)
        plotting.logarithmic(left, "x")
        left.xaxis.set_major_locator(ticker.LogLocator(numticks=5))
        left.set(xlim=(FLOOR / 2, 20), title="worst error (black: limit)")
        left.set_yticks(range(len(checks)), [key.removesuffix("_f64") for key in checks])
        left.invert_yaxis()
        left.legend(loc="lower right")
        middle.axhline(parity.marks["gradients_f64"], color="black", lw=2)
        plotting.logarithmic(middle, "y")
        middle.set(ylim=(FLOOR / 2, 20), xlabel="parameter, from the input to the output")
        middle.set_title("gradients (dotted: float32 against float64)")
        right.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        right.axhline(parity.marks["step_f64"], color="black", lw=2)
        plotting.logarithmic(right, "y")
        right.set(ylim=(FLOOR / 2, 20), xlabel="step", title="each step from the reference's state")
        for axes in (left, middle, right):
            axes.grid(alpha=0.3)
        verdict = "passed" if parity.passed else "NOT PASSED"
        figure.suptitle(
            f"{parity.recipe}: {parity.model}, relative error against {reference(parity)} in float64: {verdict}"
        )
        figure.tight_layout()
