"""The findings at the top of the page: who is fastest and by how much, what is proved, what is not known."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hvdkit.baselines.registry import label
from hvdkit.report.canvas import ranks
from hvdkit.report.collect import Found
from hvdkit.report.rounds import Group, efficiency, ratio
from hvdkit.results import intervals
from hvdkit.results.compare import BaselineRow, Comparison


@dataclass(frozen=True)
class Finding:
    """A sentence with a heading, `lead`; `kind` is good, bad, open (not known) or plain."""

    kind: str
    lead: str
    text: str


def findings(found: Found, groups: list[Group]) -> list[Finding]:
    """The findings, the most important first."""
    if found.comparison is None:
        return [_single(groups[0])]
    own = [group for group in groups if group.rival is None]
    nps = sorted({group.np for group in own})
    made = [_fastest([group for group in own if group.np == np]) for np in nps]
    made += [*_scaling(own), _parity(found.comparison), _rivals(found.comparison)]
    if found.comparison.baseline is not None:
        made.append(_baseline(found.comparison.baseline))
    noisy = [run for run in found.runs if run.result.noisy]
    if noisy:
        text = (
            f"{len(noisy)} of {len(found.runs)} runs: other processes took CPU time. Run them again on an idle machine."
        )
        made.append(Finding("bad", "Noisy", text))
    return made


def _single(group: Group) -> Finding:
    result = group.first
    rate = "" if result.val_accuracy is None else f", accuracy {100 * result.val_accuracy:.2f} %"
    speed = f"{result.images_per_second:,.1f} {result.unit}/s"
    text = f"{speed}, step {result.step_ms_p50:.1f} ms, loss {result.train_loss:.4f}{rate}"
    return Finding("plain", f"{group.framework}, {ranks(group.np)}", f"{text}. One run: no interval.")


def _fastest(groups: list[Group]) -> Finding:
    """The fastest at a number of ranks; a tie if the interval of the ratio to the second contains 1."""
    ordered = sorted(groups, key=lambda group: -group.speed.middle)
    best = ordered[0]
    speed = f"{best.speed.text()} {best.first.unit}/s"
    if len(ordered) == 1:
        return Finding("plain", ranks(best.np), f"Only {best.label} was run: {speed}.")
    second, lead, kind = ordered[1], ratio(best, ordered[1]), "plain"
    text = f"{best.label}: {speed}, {lead.text(3)} times {second.label}"
    if lead.low is None or lead.high is None:
        text += ". One run each, so it may be chance."
    else:
        confidence = intervals.confidence(lead.n)
        text += f"; {lead.n} rounds, {100 * confidence:.0f} % sure."
        if intervals.verdict(intervals.Interval(lead.middle, lead.low, lead.high)) == "tie":
            text = f"A tie of {best.label} and {second.label}{text.removeprefix(best.label)}"
        elif confidence > 0.9:
            kind = "good"
    return Finding(kind, f"Fastest at {ranks(best.np)}", text)


def _scaling(groups: list[Group]) -> list[Finding]:
    most = max(group.np for group in groups)
    known = [
        (found.middle, group.label) for group in groups if group.np == most and (found := efficiency(group, groups))
    ]
    if most == 1 or not known:
        return []
    shown = [f"{name} {100 * share:.0f} %" for share, name in sorted(known, key=lambda each: -each[0])]
    return [Finding("plain", "Scaling", f"Efficiency at {ranks(most)}: {', '.join(shown)}.")]


def _parity(comparison: Comparison) -> Finding:
    parity = comparison.parity
    if parity is None:
        return Finding("open", "Parity", "Not asked for (--no-parity): whether all did the same work is not known.")
    failed = [name for name, each in parity.frameworks.items() if not each.passed]
    if failed:
        return Finding(
            "bad", "Parity", f"FAILED: {', '.join(failed)} did not compute what {parity.reference} computes."
        )
    worst = max(each.step_f64 for each in parity.frameworks.values())
    text = f"Passed: all compute what {parity.reference} computes, to {worst:.0e} in float64 over {parity.steps} steps."
    return Finding("good", "Parity", text)


def _rivals(comparison: Comparison) -> Finding:
    against = [each for each in comparison.ratios if not each.against.startswith("np=")]
    if not against:
        return Finding("open", "Rivals", "None was measured, so other ways to train on several ranks are not compared.")
    parts = []
    for rival in dict.fromkeys(each.against for each in against):
        mine = [each for each in against if each.against == rival]
        if len(mine) <= 2:
            shown = [
                f"{each.framework} at {ranks(each.np)} {each.median:.2f} "
                f"({each.low:.2f}–{each.high:.2f}), {each.verdict}, {100 * each.confidence:.0f} % sure"
                for each in mine
            ]
        else:
            low, high = min(each.median for each in mine), max(each.median for each in mine)
            verdicts = Counter(each.verdict or "-" for each in mine).most_common()
            shown = [f"{low:.2f} to {high:.2f}", *(f"{verdict}: {count} of {len(mine)}" for verdict, count in verdicts)]
        parts.append(f"{rival}: {'; '.join(shown)}.")
    return Finding("plain", "Times the images/s of rivals", " ".join(parts))


def _baseline(rows: list[BaselineRow]) -> Finding:
    worse = [f"{label(row.framework, row.rival)} at {ranks(row.np)}" for row in rows if row.verdict == "worse"]
    if worse:
        return Finding("bad", "Against the baseline", f"Worse: {', '.join(worse)}.")
    better = sum(row.verdict == "better" for row in rows)
    return Finding("good", "Against the baseline", f"Nothing is worse; {better} of {len(rows)} are better.")
