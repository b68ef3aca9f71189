"""The findings at the top of the page: how far to trust it, which is fastest and by how much, whether parity passed."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hvdkit.baselines.registry import label
from hvdkit.report.canvas import ranks
from hvdkit.report.collect import CollectedRuns
from hvdkit.report.documents import render
from hvdkit.report.parity import reference
from hvdkit.report.rounds import RunGroup, efficiency, ratio, unscaled
from hvdkit.results import intervals
from hvdkit.results.compare import BaselineRow, Comparison, Ratio
from hvdkit.results.doubts import doubts
from hvdkit.results.train import shown_scores

_CONFIDENT = 0.9  # a finding with less confidence comes with a caution


@dataclass(frozen=True)
class Headline:
    """A sentence with a heading, `lead`; `kind` is answer (what the runs say, in short), caution, bad, good, open (not
    known) or plain.
    """

    kind: str
    lead: str
    text: str


def findings(given: CollectedRuns, groups: list[RunGroup]) -> list[Headline]:
    """The findings: a parity that failed, the answer, how far to trust it, and the rest."""
    if given.comparison is None:
        doubted = [Headline("bad", "Speed", f"{text[0].upper()}{text[1:]}.") for text in doubts(groups[0].first)]
        return [_single(groups[0]), *doubted]
    own = [group for group in groups if group.rival is None]
    nps = sorted({group.np for group in own})
    lines = [_fastest([group for group in own if group.np == np]) for np in nps[:-1]]
    parity = parity_finding(given.comparison)
    lines += [*_scaling(own), *_rivals(given.comparison, own[0].first.unit)]
    if given.comparison.baseline is not None:
        lines.append(_baseline(given.comparison.baseline))
    noisy = [run for run in given.runs if run.result.noisy]
    if noisy:
        text = (
            f"Other processes took more than a tenth of the CPU time in {len(noisy)} of {len(given.runs)} runs. Run "
            "them again on an idle machine."
        )
        lines.append(Headline("bad", "Noisy", text))
    lines.sort(key=lambda finding: finding.kind != "bad")  # stable
    answer = _answer([group for group in own if group.np == nps[-1]], given.comparison)
    first = [parity, answer] if parity.kind == "bad" else [answer, parity]  # nothing is compared if parity failed
    return [*first[:1], *_few_rounds(groups), *first[1:], *lines]


def legend(groups: list[RunGroup], comparison: Comparison | None) -> str:
    """How to read the table of results."""
    rounds = comparison.rounds if comparison else 0
    return render(
        "legend.txt",
        first=groups[0].first,
        rounds=rounds,
        confidence=intervals.confidence(rounds),
        tie=intervals.TIE,
        over_hosts=any(group.hosts > 1 for group in groups),
    ).strip()


def _answer(groups: list[RunGroup], comparison: Comparison) -> Headline:
    """Which is fastest at the most ranks; of a single framework, how it compares with the rivals there."""
    found, best = _fastest(groups), max(groups, key=lambda group: group.speed.middle)
    where = ranks(best.np)
    against = [row for row in comparison.ratios if row.np == best.np and not row.of_scaling]
    if len(groups) == 1:
        lead = f"{best.label}: {best.speed.text()} {best.first.unit}/s at {where}"
        shown = [f"{row.median:.2f} times {row.against} {_sure(row)}" for row in against]
        return Headline("answer", lead, f"{best.first.unit}/s: {'; '.join(shown)}." if shown else found.text)
    lead = f"{best.label} was the fastest at {where}, by one run each"
    if found.text.startswith("A tie"):
        lead = f"A tie at {where}"
    elif len(best.runs) > 1:
        lead = f"{best.label} is the fastest at {where}"
    return Headline("answer", lead, found.text)


def _few_rounds(groups: list[RunGroup]) -> list[Headline]:
    """The caution that there are too few rounds for intervals to rely on; empty if there are enough."""
    rounds = min(len(group.runs) for group in groups)
    if intervals.confidence(rounds) > _CONFIDENT:
        return []
    enough = next(count for count in range(rounds, 100) if intervals.confidence(count) >= intervals.CONFIDENCE)
    lead, why = "One run each: do not choose by these speeds yet", "one run does not show by how much the next differs"
    if rounds > 1:
        lead = f"Only {rounds} rounds: treat close results as ties"
        why = f"now it holds the true median with a probability of at most {100 * intervals.confidence(rounds):.0f} %"
    text = f"Measure again on an idle machine with --rounds {enough}: each figure then has a 95 % interval; {why}."
    return [Headline("caution", lead, text)]


def why_accuracies_differ(given: CollectedRuns, groups: list[RunGroup]) -> str:
    """Why accuracies differ although parity passed; empty if they do not differ, or if it did not pass."""
    parity = given.comparison and given.comparison.parity
    rates = [rate for group in groups if (rate := group.middle("val_accuracy")) is not None]
    shown = {f"{100 * rate:.2f} %": rate for rate in sorted(rates)}
    if not parity or not parity.passed or len(shown) < 2:
        return ""
    low, *_, high = shown
    text = (
        f"Accuracies differ ({low} to {high}) although parity passed. This is expected: parity compares single steps "
        "in float64, each from the same weights, but these runs trained from start to end in "
        f"{given.runs[0].result.precision}. There every framework rounds a little differently, and training amplifies "
        "the difference with each step, so correct programs end with different weights."
    )
    if samples := given.runs[0].result.val_samples:
        text += (
            f" One of the {samples:,} held-out {given.runs[0].result.unit} is {100 / samples:.2g} percentage points."
        )
    if len({group.np for group in groups}) > 1:
        text += " Runs with more ranks also have a larger global batch."
    return f"{text} Train with several seeds (seed=2, seed=3, …) before you call one framework more accurate."


def _single(group: RunGroup) -> Headline:
    result = group.first
    rate = shown_scores(result.validation)
    if not rate and result.val_accuracy is not None:  # of an earlier version
        rate = f", accuracy {100 * result.val_accuracy:.2f} %"
    speed = f"{result.images_per_second:,.1f} {result.unit}/s"
    text = f"Step {result.step_ms_p50:.1f} ms, loss {result.train_loss:.4f}{rate}. One run: no interval."
    return Headline("answer", f"{group.framework}, {ranks(group.np)}: {speed}", text)


def _fastest(groups: list[RunGroup]) -> Headline:
    """The fastest at a number of ranks; a tie if the interval of the ratio to the second contains 1."""
    ordered = sorted(groups, key=lambda group: -group.speed.middle)
    best = ordered[0]
    speed = f"{best.speed.text()} {best.first.unit}/s"
    if len(ordered) == 1:
        return Headline("plain", ranks(best.np), f"Only {best.label} was run: {speed}.")
    second, lead, kind = ordered[1], ratio(best, ordered[1]), "plain"
    text = f"{best.label}: {speed}, {lead.text(3)} times {second.label}"
    if lead.low is None or lead.high is None:
        text += " (one run each)."
    else:
        confidence = intervals.confidence(lead.n)
        text += f"; {lead.n} rounds, {100 * confidence:.0f} % confidence."
        if intervals.verdict(intervals.Interval(lead.middle, lead.low, lead.high)) == "tie":
            text = f"A tie of {best.label} and {second.label}{text.removeprefix(best.label)}"
        elif confidence > _CONFIDENT:
            kind = "good"
    return Headline(kind, f"Fastest at {ranks(best.np)}", text)


def _scaling(groups: list[RunGroup]) -> list[Headline]:
    most = max(group.np for group in groups)
    known = [
        (efficient.middle, group.label)
        for group in groups
        if group.np == most and (efficient := efficiency(group, groups))
    ]
    if most == 1 or not known:
        return []
    shown = [f"{name} {100 * share:.0f} %" for share, name in sorted(known, key=lambda row: -row[0])]
    text = f"Efficiency at {ranks(most)}: {', '.join(shown)}."
    if max(known)[0] > 1:
        text += " For values above 100 %, see the notes below the results."
    return [Headline("plain", "Scaling", text)]


def above_one(groups: list[RunGroup]) -> list[str]:
    """A note for each group whose efficiency is above 100 %, with what the results say about the reason."""
    notes = []
    for group in groups:
        estimate, alone = efficiency(group, groups), unscaled(group, groups)
        if alone is None or estimate is None or estimate.middle <= 1:
            continue
        text = f"{group.label} has an efficiency of {100 * estimate.middle:.1f} % at {ranks(group.np)}."
        one, many = alone.first.threads, group.first.threads
        if one != many:
            base = "The single rank" if alone.np == 1 else "A rank of the run on one host"
            text += f" {base} had {one} threads, each of the {group.np} ranks {many}, so they are not alike."
        noisy = sum(run.result.noisy for measured in (alone, group) for run in measured.runs)
        if noisy:
            text += f" {noisy} of the {len(alone.runs) + len(group.runs)} runs that it is computed from were noisy."
        if estimate.low is None:
            text += " With one run each, this can be chance; measure again with --rounds 6."
        elif estimate.low <= 1:
            text += " Its interval contains 100 %, so this can be chance."
        else:
            text += f" Its interval, from {estimate.n} rounds, is above 100 %; the results do not show why."
        notes.append(text)
    return notes


def parity_finding(comparison: Comparison) -> Headline:
    """Whether all computed the same."""
    parity = comparison.parity
    if parity is None:
        return Headline("open", "Parity", "Not checked (--no-parity): it is not known whether all did the same work.")
    failed = [name for name, result in parity.frameworks.items() if not result.passed]
    if failed:
        text = f"FAILED: {', '.join(failed)} did not compute what {reference(parity)} computes."
        return Headline("bad", "Parity", text)
    exact = parity.in_float64
    worst = max(result.step_f64 for result in exact.values())
    text = f"Passed: all compute what {reference(parity)} computes, to {worst:.0e} in float64, {parity.steps} steps."
    if singles := parity.frameworks.keys() - exact.keys():
        text += f" {', '.join(sorted(singles))} has float32 alone, and is as near as {reference(parity)} is in that."
    return Headline("good", "Parity", text)


def _rivals(comparison: Comparison, unit: str) -> list[Headline]:
    against = [row for row in comparison.ratios if not row.against.startswith("np=")]
    sentences = []
    for rival in dict.fromkeys(row.against for row in against):
        mine = [row for row in against if row.against == rival]
        if len(mine) <= 2:
            shown = [f"{row.framework} at {ranks(row.np)} {row.median:.2f} {_sure(row)}" for row in mine]
        else:
            low, high = min(row.median for row in mine), max(row.median for row in mine)
            verdicts = Counter(row.shown for row in mine if row.rounds > 1).most_common()
            shown = [f"{low:.2f} to {high:.2f}", *(f"{verdict}: {count} of {len(mine)}" for verdict, count in verdicts)]
        sentences.append(f"{rival}: {'; '.join(shown)}.")
    return [Headline("plain", f"{unit}/s ÷ the rival's", " ".join(sentences))] if sentences else []


def _sure(row: Ratio) -> str:
    """The interval of a ratio, its confidence and the verdict; a single round has no interval."""
    if row.rounds == 1:
        return "(one run each)"
    return f"({row.low:.2f}–{row.high:.2f}), {row.verdict}, {100 * row.confidence:.0f} % confidence"


def _baseline(rows: list[BaselineRow]) -> Headline:
    worse = [f"{label(row.framework, row.rival)} at {ranks(row.np)}" for row in rows if row.verdict == "worse"]
    if worse:
        return Headline("bad", "Against the earlier comparison", f"Worse: {', '.join(worse)}.")
    better = sum(row.verdict == "better" for row in rows)
    return Headline("good", "Against the earlier comparison", f"Nothing is worse; {better} of {len(rows)} are better.")
