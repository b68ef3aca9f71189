"""Predictions and advice as lines of text, and `advise.md`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdkit.simulator.money import amount

if TYPE_CHECKING:
    from hvdkit.simulator.advise import Advice, Suggestion
    from hvdkit.simulator.plans import TrainingPlan
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
        mine = [change for change in advice.suggestions if change.kind == kind]
        shown += mine[:_SHOWN]
        lines.append(f"{kind}:" if mine else f"{kind}: nothing that was tried brings half a percent")
        lines += [f"  {suggestion_line(change, advice.today.unit)}" for change in mine[:_SHOWN]]
        lines += [f"  {len(mine) - _SHOWN} more in advise.md"] if len(mine) > _SHOWN else []
    return [*lines, f"more ranks: {advice.adding.told}", *(f"note: {note}" for note in _notes(advice, shown))]


def suggestion_line(change: Suggestion, unit: str = "images") -> str:
    """One suggestion in a line; `unit` is what speeds count."""
    sentences = [f"{_gain(change.gain, change)} × {unit}/s ({_believed(change)}): {change.what}"]
    if change.currency is None and change.effort == "other machines":
        sentences.append("their price is unknown")
    elif change.train_cost is not None:
        saved = "" if change.saved is None else f", {amount(abs(change.saved), change.currency)} {_less(change.saved)}"
        sentences.append(f"training costs {amount(change.train_cost, change.currency)}{saved}")
    elif change.cost_per_million_images is not None:
        sentences.append(f"a million {unit} cost {amount(change.cost_per_million_images, change.currency)}")
    if change.points_lost is not None and change.points_lost > 0:
        per_point = (
            change.saved and change.saved > 0 and f", {amount(change.saved / change.points_lost, change.currency)} each"
        )
        of = "" if unit == "images" else " of images"
        sentences.append(f"lost {change.points_lost:.1f} points of accuracy on a small model{of}{per_point or ''}")
    return "; ".join(sentences)


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


def _way(way: TrainingPlan) -> str:
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
    notes = [*advice.today.warnings, *(note for change in suggestions for note in change.warnings)]
    notes += [f"left out: {what}; {reason}" for what, reason in advice.left_out.items()]
    return [note for note in dict.fromkeys(notes) if note not in advice.guesses]


def advice_markdown(advice: Advice) -> str:
    """`advise.md`: a table of the suggestions with effort, risk and time."""
    from hvdkit.report.documents import render  # a prediction needs no Jinja

    suggestions = [
        [
            *(f"{change.kind}: {change.what}", _gain(change.gain, change), _believed(change)),
            "" if change.epoch_s is None else time_text(change.epoch_s),
            *(
                _amount(value, change.currency)
                for value in (change.train_cost, change.saved, change.cost_per_million_images)
            ),
            *(change.effort, change.risk),
        ]
        for change in advice.suggestions
    ]
    today = point_line(advice.today).strip()
    plans, notes = _plans(advice), _notes(advice, advice.suggestions)
    return render("advise.md", advice=advice, today=today, plans=plans, suggestions=suggestions, notes=notes)


def _believed(change: Suggestion) -> str:
    return f"{_gain(change.gain_low, change)} to {_gain(change.gain_high, change)}{'' if change.sure else ', not sure'}"


def _gain(value: float, change: Suggestion) -> str:
    return f"{value:.{3 if change.gain < 1.1 else 2}f}"


def time_text(seconds: float) -> str:
    """A duration in the unit that suits it."""
    for unit, length in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s"


def _amount(value: float | None, currency: str | None) -> str:
    return "" if value is None else amount(value, currency)
