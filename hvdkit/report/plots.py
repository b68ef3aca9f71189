"""Pictures of a proof of parity."""

from __future__ import annotations

from pathlib import Path

from hvdkit.report import plotting
from hvdkit.results.parity import Parity

_FLOOR = 1e-17  # what agrees bit by bit is drawn here; a logarithm knows no zero


def parity_plot(parity: Parity, path: Path) -> None:
    """Errors of each framework: by check against their marks, by layer, and by step; written to `path` as PNG.

    Raises RunError where it cannot be written.
    """
    with plotting.picture(path, 16, 5.5) as figure:
        from matplotlib import ticker

        left, middle, right = figure.subplots(1, 3, width_ratios=(1.1, 1.4, 1))
        checks = list(parity.marks)
        for index, (name, each) in enumerate(parity.frameworks.items()):
            places = [place + 0.15 * (index - (len(parity.frameworks) - 1) / 2) for place in range(len(checks))]
            values = [max(_FLOOR, min(getattr(each, key), 10.0)) for key in checks]
            left.plot(values, places, "o", label=name, color=f"C{index}")
            gradients = [max(_FLOOR, min(value, 10.0)) for value in each.gradient_errors_f64.values()]
            middle.plot(gradients, ".-", lw=0.6, ms=3, color=f"C{index}")
            single = [max(_FLOOR, min(value, 10.0)) for value in each.gradient_errors_f32.values()]
            middle.plot(single, ".:", lw=0.6, ms=3, color=f"C{index}")
            steps = [max(_FLOOR, min(value, 10.0)) for value in each.step_errors_f64]
            right.plot(range(1, len(steps) + 1), steps, ".-", color=f"C{index}")
        for place, key in enumerate(checks):
            left.plot([parity.marks[key]] * 2, [place - 0.4, place + 0.4], color="black", lw=2)
        left.set(xscale="log", xlim=(_FLOOR / 2, 20), title="worst error (black: mark)")
        left.set_yticks(range(len(checks)), [key.removesuffix("_f64") for key in checks])
        left.invert_yaxis()
        left.legend(loc="lower right")
        middle.axhline(parity.marks["gradients_f64"], color="black", lw=2)
        middle.set(yscale="log", ylim=(_FLOOR / 2, 20), xlabel="parameter, from the input to the output")
        middle.set_title("gradients (solid: float64, dotted: float32 against float64)")
        right.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        right.axhline(parity.marks["step_f64"], color="black", lw=2)
        right.set(yscale="log", ylim=(_FLOOR / 2, 20), xlabel="step", title="each step from the reference's state")
        for axes in (left, middle, right):
            axes.grid(alpha=0.3)
        verdict = "passed" if parity.passed else "NOT PASSED"
        figure.suptitle(
            f"{parity.recipe}: {parity.model}, relative error against {parity.reference} in float64: {verdict}"
        )
        figure.tight_layout()
