"""Predictions and advice as lines of text, and `advise.md`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdkit.simulator.money import amount

if TYPE_CHECKING:
    from hvdkit.simulator.advise import Advice, Suggestion
    from hvdkit.simulator.plans import Way
    from hvdkit.simulator.predict import Point, Prediction


_SHOWN = 5  # suggestions of a kind on the terminal


def prediction_lines(prediction: Prediction) -> list[str]:
    """A line for each number of ranks, then the notes on them."""
    lines = [f"{prediction.model} on {prediction.cluster}, from a profile of {prediction.profile}"]
    lines += [point_line(point) for point in prediction.points]
    lines += [memory_line(point) for point in prediction.points if point.memory_parts_mib]
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
        f"{_who(point)}: {point.step_ms:.1f} ms per step ({point.low_ms:.1f} to {point.high_ms:.1f}), "
        f"{point.images_per_second:,.0f} {point.unit}/s, efficiency {100 * point.efficiency:.1f} %, "
        f"{point.exposed_communication_ms:.1f} ms exposed communication, bound by {bound}"
    )


def memory_line(point: Point) -> str:
    """What a rank keeps, by part."""
    parts = ", ".join(f"{name} {mib:,.0f}" for name, mib in (point.memory_parts_mib or {}).items())
    return f"{_who(point)}: {point.memory_mib:,.0f} MiB of memory: {parts}"


def _who(point: Point) -> str:
    return f"{point.ranks:>7} rank{'s' if point.ranks > 1 else ''}"


def advice_lines(advice: Advice) -> list[str]:
    """Guesses first, then today's step and costs, the ways within budget and deadline, a line for each of the best
    suggestions, software first, the effect of more ranks, and notes on what is shown.
    """
    lines = [f"a guess, so that no gain below is sure: {guess}" for guess in advice.guesses]
    lines += [f"{advice.model} on {advice.cluster}, today", point_line(advice.today), advice.money, *_plans(advice)]
    shown = []
    for kind in ("software", "hardware"):
        mine = [each for each in advice.suggestions if each.kind == kind]
        shown += mine[:_SHOWN]
        lines.append(f"{kind}:" if mine else f"{kind}: nothing that was tried brings half a percent")
        lines += [f"  {suggestion_line(each, advice.today.unit)}" for each in mine[:_SHOWN]]
        lines += [f"  {len(mine) - _SHOWN} more in advise.md"] if len(mine) > _SHOWN else []
    return [*lines, f"more ranks: {advice.adding.told}", *(f"note: {note}" for note in _notes(advice, shown))]


def suggestion_line(each: Suggestion, unit: str = "images") -> str:
    """One suggestion in a line; `unit` is what speeds count."""
    parts = [f"{_gain(each.gain, each)} × {unit}/s ({_believed(each)}): {each.what}"]
    if each.currency is None and each.effort == "other machines":
        parts.append("their price is unknown")
    elif each.train_cost is not None:
        saved = "" if each.saved is None else f", {amount(abs(each.saved), each.currency)} {_less(each.saved)}"
        parts.append(f"training costs {amount(each.train_cost, each.currency)}{saved}")
    elif each.cost_per_million_images is not None:
        parts.append(f"a million {unit} cost {amount(each.cost_per_million_images, each.currency)}")
    if each.points_lost is not None and each.points_lost > 0:
        per_point = each.saved and each.saved > 0 and f", {amount(each.saved / each.points_lost, each.currency)} each"
        of = "" if unit == "images" else " of images"
        parts.append(f"lost {each.points_lost:.1f} points of accuracy on a small model{of}{per_point or ''}")
    return "; ".join(parts)


def _less(saved: float) -> str:
    return "less" if saved >= 0 else "more"


def _plans(advice: Advice) -> list[str]:
    plans = advice.plans
    if plans is None:
        return []
    limits = [f"within {time_text(plans.deadline_s)}"] if plans.deadline_s else []
    limits += [f"for {amount(plans.budget, plans.currency)}"] if plans.budget is not None else []
    limit = " and ".join(limits)
    if plans.cheapest is None or plans.fastest is None:
        nearest = f"; nearest: {_way(plans.nearest)}" if plans.nearest else ""
        return [f"{limit}: no way of {plans.tried} that were tried{nearest}"]
    return [
        f"{limit}, the cheapest of {plans.tried} ways: {_way(plans.cheapest)}",
        f"{limit}, the fastest: {_way(plans.fastest)}",
    ]


def _way(way: Way) -> str:
    cost = ", price unknown"
    if way.cost is not None and way.cost_high is not None:
        cost = f", {amount(way.cost, way.currency)} (up to {amount(way.cost_high, way.currency)})"
    return (
        f"{way.ranks} rank{'s' * (way.ranks > 1)}, {way.device} on {way.cluster}: {time_text(way.train_s)} "
        f"(up to {time_text(way.train_high_s)}){cost}, global batch {way.global_batch}"
        f", {_percent(way.probability)} likely{'' if way.sure else ', not sure'}"
    )


def _percent(probability: float) -> str:
    """Never sure, never impossible."""
    return "over 99 %" if probability > 0.99 else "under 1 %" if probability < 0.01 else f"{100 * probability:.0f} %"


def _notes(advice: Advice, suggestions: list[Suggestion]) -> list[str]:
    """Today's notes, those on the suggestions, and what was left out; guesses stand above."""
    notes = [*advice.today.warnings, *(note for each in suggestions for note in each.warnings)]
    notes += [f"left out: {what}; {reason}" for what, reason in advice.left_out.items()]
    return [note for note in dict.fromkeys(notes) if note not in advice.guesses]


def advice_markdown(advice: Advice) -> str:
    """`advise.md`: a table of the suggestions with effort, risk and time."""
    from hvdkit.report.documents import render  # a prediction needs no Jinja

    suggestions = [
        [
            *(f"{each.kind}: {each.what}", _gain(each.gain, each), _believed(each)),
            "" if each.epoch_s is None else time_text(each.epoch_s),
            *(_amount(value, each.currency) for value in (each.train_cost, each.saved, each.cost_per_million_images)),
            *(each.effort, each.risk),
        ]
        for each in advice.suggestions
    ]
    today = point_line(advice.today).strip()
    plans, notes = _plans(advice), _notes(advice, advice.suggestions)
    return render("advise.md", advice=advice, today=today, plans=plans, suggestions=suggestions, notes=notes)


def _believed(each: Suggestion) -> str:
    return f"{_gain(each.gain_low, each)} to {_gain(each.gain_high, each)}{'' if each.sure else ', not sure'}"


def _gain(value: float, each: Suggestion) -> str:
    return f"{value:.{3 if each.gain < 1.1 else 2}f}"


def time_text(seconds: float) -> str:
    """A duration in the unit that suits it."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s"


def _amount(value: float | None, currency: str | None) -> str:
    return "" if value is None else amount(value, currency)
