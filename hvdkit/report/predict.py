"""Predictions and advice as lines of text, and `advise.md`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hvdkit.report.tabular import Of, Table, bar, number, terminal
from hvdkit.simulator.money import amount

if TYPE_CHECKING:
    from hvdkit.simulator.advise import Advice, Suggestion
    from hvdkit.simulator.plans import TrainingPlan
    from hvdkit.simulator.predict import Point, Prediction


_SHOWN = 5  # suggestions of a kind on the terminal
_BAR = 16  # characters


def prediction_lines(prediction: Prediction) -> list[Any]:
    """A title, a table with a row for each number of ranks, then the notes on them."""
    table = prediction_table(prediction)
    lines = [
        f"{prediction.model} on {prediction.cluster}, from a profile of {prediction.profile}",
        terminal(table, "", wrap_from=len(table.columns) - 1),
    ]
    alike: dict[str, list[str]] = {}  # numbers of ranks by what each rank holds
    for point in prediction.points:
        if point.memory_parts_mib:
            parts = ", ".join(f"{name} {mib:,.0f}" for name, mib in point.memory_parts_mib.items())
            alike.setdefault(f"{point.memory_mib:,.0f} MiB of memory: {parts}", []).append(str(point.ranks))
    lines += [f"{', '.join(who)} rank{'s' * (who != ['1'])}: {memory}" for memory, who in alike.items()]
    for point in prediction.points:
        if point.memory_by_stage_mib and len(point.memory_by_stage_mib) > 1:
            stages = ", ".join(f"{mib:,.0f}" for mib in point.memory_by_stage_mib)
            lines.append(f"{_who(point)}: MiB by stage: {stages}")
    for warning in dict.fromkeys(warning for point in prediction.points for warning in point.warnings):
        ranks = [str(point.ranks) for point in prediction.points if warning in point.warnings]
        lines.append(f"note ({', '.join(ranks)} ranks): {warning}")
    return lines


def prediction_table(prediction: Prediction) -> Table:
    """A row for each number of ranks; `wait` is communication that nothing hides, a bar shows the efficiency."""
    columns: dict[str, Of[Point]] = {
        "ranks": lambda point: number(point.ranks),
        "ms/step": lambda point: number(point.step_ms, 1),
        "interval": lambda point: f"{_short(point.low_ms)}–{_short(point.high_ms)}",
        f"{prediction.points[0].unit}/s": lambda point: number(point.images_per_second),
        "efficiency": lambda point: f"{bar(point.efficiency)} {100 * point.efficiency:3.0f} %",
        "wait, ms": lambda point: number(point.exposed_communication_ms, 1),
        "bound by": _bound,
    }
    return Table.of("predict", prediction.points, columns)


def point_line(point: Point) -> str:
    """One number of ranks in a line."""
    return (
        f"{_who(point)}: {point.step_ms:.1f} ms per step ({point.low_ms:.1f} to {point.high_ms:.1f}), "
        f"{point.images_per_second:,.0f} {point.unit}/s, efficiency {100 * point.efficiency:.1f} %, "
        f"{point.exposed_communication_ms:.1f} ms exposed communication, bound by {_bound(point)}"
    )


def _short(ms: float) -> str:
    return f"{ms:.{0 if ms >= 100 else 1}f}"


def _bound(point: Point) -> str:
    return "work between steps" if point.bound == "gaps" else point.bound


def _who(point: Point) -> str:
    return f"{point.ranks:>7} rank{'s' if point.ranks > 1 else ''}"


def advice_lines(advice: Advice) -> list[str]:
    """Guesses first, then today's step and costs, the ways within budget and deadline, a line with a bar for each of
    the best suggestions, software first, what needs less memory, the effect of more ranks, the risks of what is shown,
    and notes on it.
    """
    lines = [f"a guess, so that no gain below is sure: {guess}" for guess in advice.guesses]
    lines += [f"{advice.model} on {advice.cluster}, today", point_line(advice.today), advice.money, *_plans(advice)]
    shown = []
    for kind in ("software", "hardware"):
        mine = [change for change in advice.suggestions if change.kind == kind]
        shown += mine[:_SHOWN]
        most = max((change.gain_high for change in mine[:_SHOWN]), default=1.0)
        scale = f"a whole bar is {most:.3g} ×: █ at least, ▒ expected, ░ at most"
        lines.append(f"{kind} ({scale}):" if mine else f"{kind}: nothing that was tried brings half a percent")
        lines += [f"  {gain_bar(change, most)} {_suggestion(change, advice.today.unit)}" for change in mine[:_SHOWN]]
        lines += [f"  {len(mine) - _SHOWN} more in advise.md"] if len(mine) > _SHOWN else []
    lines += _memory(advice)
    return [*lines, f"more ranks: {advice.adding.told}", *_risks(shown), *_once(_notes(advice, shown))]


def gain_bar(change: Suggestion, most: float) -> str:
    """A gain as a bar of `_BAR` characters: full to the least, then to what is expected, then to the most."""
    span = max(most - 1, 1e-9)
    ends = [
        round(_BAR * min(1.0, max(0.0, gain - 1) / span)) for gain in (change.gain_low, change.gain, change.gain_high)
    ]
    least, expected, top = ends[0], max(ends[:2]), max(ends)
    return f"{'█' * least}{'▒' * (expected - least)}{'░' * (top - expected)}".ljust(_BAR, "·")


def _memory(advice: Advice) -> list[str]:
    """What a rank needs of its device today, and less with which change; nothing where that is unknown."""
    room, needed = advice.room_mib, advice.today.memory_mib
    if not room or not needed:
        return []
    lines = [
        f"memory: {needed:,.0f} MiB of the {room:,.0f} that a rank may fill" + (", less with" * bool(advice.smaller))
    ]
    for change in advice.smaller[:_SHOWN]:
        size = change.memory_mib or 0.0
        lines.append(f"  {bar(size / room, _BAR)} {size:,.0f} MiB at {change.gain:.2f} × the speed: {change.what}")
    return lines


def _risks(shown: list[Suggestion]) -> list[str]:
    """Each risk of what is shown, once."""
    by_risk: dict[str, list[str]] = {}
    for change in shown:
        if not change.risk.startswith("none"):
            by_risk.setdefault(change.risk, []).append(change.what)
    return [
        f"risk ({names[0]}{f', and {len(names) - 1} more' if len(names) > 1 else ''}): {risk}"
        for risk, names in by_risk.items()
    ]


def _suggestion(change: Suggestion, unit: str) -> str:
    """One suggestion in a line; `unit` is what speeds count."""
    facts = [f"{_gain(change.gain, change)} × {unit}/s ({_believed(change)}): {change.what}"]
    if change.currency is None and change.effort == "other machines":
        facts.append("their price is unknown")
    elif change.train_cost is not None:
        facts.append(f"training costs {amount(change.train_cost, change.currency)}")
        if change.saved is not None:
            facts[-1] += f", {amount(abs(change.saved), change.currency)} {'less' if change.saved >= 0 else 'more'}"
    elif change.cost_per_million_images is not None:
        facts.append(f"a million {unit} cost {amount(change.cost_per_million_images, change.currency)}")
    if change.points_lost:
        facts.append(f"lost {change.points_lost:.1f} points of accuracy")
    return "; ".join(facts)


def _plans(advice: Advice) -> list[str]:
    plans = advice.plans
    if plans is None:
        return []
    limits = [f"within {time_text(plans.deadline_s)}"] if plans.deadline_s else []
    limits += [f"for {amount(plans.budget, plans.currency)}"] if plans.budget is not None else []
    ways = {"the cheapest": plans.cheapest, "the fastest": plans.fastest, "none, the nearest": plans.nearest}
    found = [f"{name} of {plans.tried} ways: {_way(way)}" for name, way in ways.items() if way]
    return [f"{' and '.join(limits)}, {line}" for line in found or [f"none of {plans.tried} ways"]]


def _way(way: TrainingPlan) -> str:
    cost = "price unknown"
    if way.cost is not None and way.cost_high is not None:
        cost = f"{amount(way.cost, way.currency)} (up to {amount(way.cost_high, way.currency)})"
    percent = min(99.0, max(1.0, 100 * way.probability))  # never sure, never impossible
    return (
        f"{way.ranks} rank{'s' * (way.ranks > 1)}, {way.device} on {way.cluster}: {time_text(way.train_s)} "
        f"(up to {time_text(way.train_high_s)}), {cost}, global batch {way.global_batch}, {percent:.0f} % likely"
        f"{'' if way.sure else ', not sure'}"
    )


def _notes(advice: Advice, suggestions: list[Suggestion]) -> list[str]:
    """Today's notes, those on the suggestions, and what was left out; guesses stand above."""
    notes = [*advice.today.warnings, *(note for change in suggestions for note in change.warnings)]
    notes += [f"left out: {what}; {reason}" for what, reason in advice.left_out.items()]
    return [note for note in dict.fromkeys(notes) if note not in advice.guesses]


def _once(notes: list[str]) -> list[str]:
    """A line for each kind of note: those that differ in numbers alone are one, with how many more there are."""
    alike: dict[str, list[str]] = {}
    for note in notes:
        alike.setdefault(re.sub(r"\S*\d\S*", "#", note), []).append(note)
    rest = {kind: f" ({len(of_kind) - 1} more of this kind in advise.md)" for kind, of_kind in alike.items()}
    return [f"note: {of_kind[0]}{rest[kind] if len(of_kind) > 1 else ''}" for kind, of_kind in alike.items()]


def advice_markdown(advice: Advice) -> str:
    """`advise.md`: a table of the suggestions with effort, risk and time."""
    from hvdkit.report.documents import render  # a prediction needs no Jinja

    rows = []
    for change in advice.suggestions:
        costs = change.train_cost, change.saved, change.cost_per_million_images
        row = [f"{change.kind}: {change.what}", _gain(change.gain, change), _believed(change)]
        row += ["" if change.epoch_s is None else time_text(change.epoch_s)]
        row += ["" if cost is None else amount(cost, change.currency) for cost in costs]
        rows.append([*row, change.effort, change.risk])
    today, plans, notes = point_line(advice.today).strip(), _plans(advice), _notes(advice, advice.suggestions)
    memory = _memory(advice)
    return render("advise.md", advice=advice, today=today, plans=plans, suggestions=rows, notes=notes, memory=memory)


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
