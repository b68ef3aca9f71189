"""Predictions and advice as lines of text, and `advise.md`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hvdkit.simulator.advise import Advice, Suggestion
    from hvdkit.simulator.predict import Point, Prediction


def prediction_lines(prediction: Prediction) -> list[str]:
    """A line for each number of ranks, then the notes on them."""
    lines = [f"{prediction.model} on {prediction.cluster}, from a profile of {prediction.profile}"]
    lines += [point_line(point) for point in prediction.points]
    warned: dict[str, list[int]] = {}
    for point in prediction.points:
        for warning in point.warnings:
            warned.setdefault(warning, []).append(point.ranks)
    lines += [f"note ({', '.join(map(str, ranks))} ranks): {warning}" for warning, ranks in warned.items()]
    return lines


def point_line(point: Point) -> str:
    """One number of ranks in a line."""
    bound = "work between steps" if point.bound == "gaps" else point.bound
    return (
        f"{point.ranks:>7} ranks: {point.step_ms:.1f} ms per step ({point.low_ms:.1f} to {point.high_ms:.1f}), "
        f"{point.images_per_second:,.0f} images/s, efficiency {100 * point.efficiency:.1f} %, "
        f"{point.exposed_communication_ms:.1f} ms exposed communication, bound by {bound}"
    )


def advice_lines(advice: Advice) -> list[str]:
    """Today's step, a line for each suggestion, software first, and the effect of more ranks."""
    lines = [f"{advice.model} on {advice.cluster}, today", point_line(advice.today)]
    for kind in ("software", "hardware"):
        mine = [each for each in advice.suggestions if each.kind == kind]
        lines.append(f"{kind}:" if mine else f"{kind}: nothing that was tried brings half a percent")
        lines += [f"  {suggestion_line(each)}" for each in mine]
    return [*lines, f"more ranks: {advice.adding.told}"]


def suggestion_line(each: Suggestion) -> str:
    """One suggestion in a line."""
    money = "" if each.saved is None else f"; training costs {each.train_cost:,.2f}, {each.saved:+,.2f} saved"
    return f"{each.gain:.2f} × images/s ({_believed(each)}): {each.what}{money}"


def advice_markdown(advice: Advice) -> str:
    """`advise.md`: a table of the suggestions with effort, risk and time."""
    from hvdkit.report.documents import render  # a prediction needs no Jinja

    suggestions = [
        [
            *(f"{each.kind}: {each.what}", f"{each.gain:.2f}", _believed(each), _time(each.epoch_s)),
            *(_amount(each.train_cost), _amount(each.saved), each.effort, each.risk),
        ]
        for each in advice.suggestions
    ]
    notes = dict.fromkeys(note for each in advice.suggestions for note in each.warnings)
    today = point_line(advice.today).strip()
    return render("advise.md", advice=advice, today=today, suggestions=suggestions, notes=notes)


def _believed(each: Suggestion) -> str:
    return f"{each.gain_low:.2f} to {each.gain_high:.2f}{'' if each.sure else ', not sure'}"


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds:.1f} s"


def _amount(value: float | None) -> str:
    return "" if value is None else f"{value:,.2f}"
