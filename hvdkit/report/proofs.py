"""The charts of ratios against rivals and of parity."""

from __future__ import annotations

from hvdkit.report import svg
from hvdkit.report.canvas import Chart, Look, brief, drawing, finished, label_rows, legend, ranks, whole_numbers
from hvdkit.report.parity import FLOOR, clipped
from hvdkit.report.tabular import Cell, Table, number, percent
from hvdkit.results.compare import Ratio
from hvdkit.results.parity import Parity


def ratios(look: Look, ratios: list[Ratio]) -> Chart | None:
    """Images per second over each rival's, with intervals; None if no rival was measured."""
    shown = [each for each in ratios if not each.against.startswith("np=")]
    if not shown:
        return None
    columns = ["framework", "ranks", "against", "ratio", "low", "high", "rounds", "sure", "verdict"]
    table = Table("ratios", columns, [])
    with drawing(46 + 21 * len(shown)) as canvas:
        axes = canvas.figure.subplots()
        for row, each in enumerate(shown):
            style = look.line(each.framework)
            axes.plot([each.low, each.high], [row, row], color=style["color"], lw=2.4)
            axes.plot(each.median, row, style["marker"], color=style["color"], ms=7, mec=svg.SURFACE)
            text = f"{each.framework}, {ranks(each.np)}, against {each.against}: "
            text += f"{each.median:.3f} ({each.low:.3f}–{each.high:.3f}), n = {each.rounds}: {each.verdict or '-'}"
            for place in (each.low, each.median, each.high):
                canvas.point(axes, place, row, text)
            figures = [number(value, 3) for value in (each.median, each.low, each.high)]
            known = [Cell(each.framework), number(each.np), Cell(each.against)]
            judged = [number(each.rounds), percent(each.confidence, 0), Cell(each.verdict or "-")]
            table.rows.append([*known, *figures, *judged])
        axes.axvline(1, color=svg.MUTED, lw=1.2)
        label_rows(axes, [brief(f"{each.framework} {each.np}, {each.against}") for each in shown])
        axes.set_xlabel("times the rival's images/s (1: equal)")
        summary = [f"{each.framework} at {ranks(each.np)} against {each.against}: {each.verdict}" for each in shown]
        return finished(canvas, "ratios", "Against rivals", "; ".join(summary) + ".", table)


def parity(look: Look, parity: Parity) -> list[Chart]:
    """The errors of each check, with the limits, and by step."""
    return [_checks(look, parity), _steps(look, parity)]


def _checks(look: Look, parity: Parity) -> Chart:
    checks = list(parity.marks)
    table = Table("parity-errors", ["framework", "check", "error", "mark"], [])
    with drawing(60 + 22 * len(checks)) as canvas:
        axes = canvas.figure.subplots()
        for row, key in enumerate(checks):
            limit = clipped(parity.marks[key])
            axes.plot([limit, limit], [row - 0.42, row + 0.42], color=svg.BAD, lw=2)
            canvas.point(axes, limit, row, f"{key.removesuffix('_f64')}: largest error that passes, {limit:.0e}")
        for order, (name, each) in enumerate(parity.frameworks.items()):
            style = look.line(name, ls="", ms=6)
            shift = 0.16 * (order - (len(parity.frameworks) - 1) / 2)
            values = [clipped(getattr(each, key)) for key in checks]
            axes.plot(values, [row + shift for row in range(len(checks))], **style, label=brief(name))
            for row, key in enumerate(checks):
                text = f"{name}, {key.removesuffix('_f64')}: {getattr(each, key):.1e}"
                canvas.point(axes, values[row], row + shift, text)
                figures = [Cell(f"{error:.1e}", error) for error in (getattr(each, key), parity.marks[key])]
                table.rows.append([Cell(name), Cell(key.removesuffix("_f64")), *figures])
        axes.set_xscale("log")
        axes.set_xlim(FLOOR / 3, max(1e-6, axes.get_xlim()[1]))
        axes.xaxis.set_major_formatter("{x:.0e}")
        label_rows(axes, [key.removesuffix("_f64") for key in checks])
        axes.set_xlabel("relative error in float64; below 1e-17 drawn there")
        legend(canvas, axes)
        summary = f"Largest relative error of each check against {parity.reference}, beside its mark."
        note = "Upright bars: the largest errors that pass."
        return finished(canvas, "parity", "Errors against their marks", summary, table, note)


def _steps(look: Look, parity: Parity) -> Chart:
    table = Table("parity-steps", ["framework", "step", "error"], [])
    with drawing(250) as canvas:
        axes = canvas.figure.subplots()
        for name, each in parity.frameworks.items():
            style = look.line(name, lw=1.2, ms=5)
            errors = [clipped(error) for error in each.step_errors_f64]
            axes.plot(range(1, len(errors) + 1), errors, **style, label=brief(name))
            for step, error in enumerate(each.step_errors_f64, 1):
                canvas.point(axes, step, errors[step - 1], f"{name}, step {step}: {error:.1e}")
                table.rows.append([Cell(name), number(step), Cell(f"{error:.1e}", error)])
        axes.axhline(clipped(parity.marks["step_f64"]), color=svg.BAD, lw=2)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.0e}")
        axes.set_ylim(bottom=FLOOR / 3)
        whole_numbers(axes)
        axes.set(xlabel="step", ylabel="relative error")
        axes.grid(axis="y")
        legend(canvas, axes)
        summary = f"Largest relative error after each of {parity.steps} steps from the reference's own states."
        return finished(canvas, "parity-steps", "Each step by itself", summary, table, "Line: the mark.")
