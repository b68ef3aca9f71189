"""Figures in prose, held to the results of benchmarks that they come from.

    .venv/bin/python -m scripts.figures       writes all figures of README.md and docs/ anew

A figure is a number, with ` %` where it is a fraction of 1 or a power such as ` × 10⁻¹²`, directly before a comment
that says where its value is: `1.24<!-- cost/recipes/gpt-tiny/frameworks/pytorch/marks/speed ÷ DDP, 2 ranks/ratio/median
-->`, a file of benchmarks/ or docs/ and the keys in it. A key of a list is the value that one of an item's fields has,
or several such values, `4 & optimizer`. A list of numbers is their median. It is rounded as it is written. An older
result than `SINCE` is taken where the marker ends with its day, ` on 25 November 2026`, and the page says it.

Each result says what holds its sides to the same work, its `parity`, and the commit and the code that it measures:
where more than `CHANGED_AT_MOST` of the lines of that code have changed since, it is not of today any more.

A table is what benchmarks/pages/tables/NAME.md.j2 makes of a part of a result, between `<!-- NAME FILE/KEY… -->`
and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import written
from hvdkit.errors import RequestError
from hvdkit.files import write_atomic

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
# The day since which no change moves the speed of training. Whoever makes such a change sets it to the day of the
# change; then figures that were measured before it are refused.
SINCE = "28 November 2026"
# Of the lines of the code that a result measures. Above it: measure again, or set `SINCE` and say the day.
CHANGED_AT_MOST = 0.25
_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_TABLE = re.compile(
    r"(?P<begin><!-- (?P<name>[\w-]+) (?P<place>[\w-]+(?:/[^>]+?)?(?: on [\w ]+)?) -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)
_FIGURE = re.compile(
    r"(?P<number>\d[\d,]*(?:\.(?P<decimals>\d+))?)(?P<percent> %)?(?: × 10(?P<power>[⁻⁰¹²³⁴⁵⁶⁷⁸⁹]+))?"
    r"<!-- (?P<place>[\w.-]+/[^>]+?) -->"
)


def renewed(text: str, benchmarks: Path = ROOT / "benchmarks") -> str:
    """The text with each figure and table as its result has it.

    Raises RequestError for a place that no result has, and for a result that is older than `SINCE` or whose parity was
    not checked or has failed.
    """

    said = " ".join(prose(text).split())

    def value_of(match: re.Match[str]) -> Any:
        place, _, day = match["place"].partition(" on ")
        if day and day not in said:
            raise RequestError(f"{match['place']}: the page does not say that it was measured on {day}")
        return looked_up(place, benchmarks, day)

    def figure(match: re.Match[str]) -> str:
        value = value_of(match)
        if not isinstance(value, int | float):
            raise RequestError(f"{match['place']}: expected a number, got {json.dumps(value)[:60]}")
        value *= 100 if match["percent"] else 1
        unit, decimals = match["percent"] or "", len(match["decimals"] or "")
        if match["power"]:
            mantissa, _, power = f"{value:.{decimals}e}".partition("e")
            return f"{mantissa} × 10{str(int(power)).translate(_RAISED)}<!-- {match['place']} -->"
        return f"{value:,.{decimals}f}{unit}<!-- {match['place']} -->"

    def table(match: re.Match[str]) -> str:
        made = written.page(f"tables/{match['name']}", value_of(match))
        return f"{match['begin']}{made}{match['end']}"

    return _TABLE.sub(table, _FIGURE.sub(figure, text))


def prose(text: str) -> str:
    """The text without its figures and tables that come from results."""
    return _TABLE.sub("", _FIGURE.sub("", text))


def results(text: str) -> set[str]:
    """The files of benchmarks/ and docs/ that the text takes figures from, without their endings."""
    places = (match["place"] for pattern in (_FIGURE, _TABLE) for match in pattern.finditer(text))
    return {place.partition(" on ")[0].partition("/")[0] for place in places}


def looked_up(place: str, benchmarks: Path, day: str = "") -> Any:
    """The value at FILE/KEY/KEY…, of a result of that day or not older than `SINCE`; raises as `renewed` does."""
    name, *keys = place.split("/")
    found = [folder / f"{name}.json" for folder in (benchmarks, ROOT / "docs")]
    value = _result(next((path for path in found if path.exists()), found[0]))
    same_work = isinstance(value, list)  # it has errors of predictions
    dated = None if same_work else value  # the innermost part that says its day
    for key in [None, *keys]:
        value = value if key is None else _item(value, key)
        if value is None:
            raise RequestError(f"{place}: benchmarks/{name}.json has no `{key}` there; correct the place")
        if isinstance(value, dict):
            dated = value if value.get("measured") else dated
            parity = value.get("parity")
            if (isinstance(parity, dict) and not parity["passed"]) or value.get("passed") is False:
                raise RequestError(f"{place}: its parity has failed; a speed counts only where it passes")
            same_work = same_work or bool(parity) or value.get("passed") is True
    if dated is not None:
        measured = dated.get("measured")
        if not measured:
            raise RequestError(f"{place}: benchmarks/{name}.json does not say when it was measured")
        if measured != day if day else older(dated):
            raise RequestError(f"{place}: measured {measured}, and speeds have changed {SINCE}; measure it again")
    if not same_work:
        raise RequestError(f"{place}: its parity was not checked; benchmarks/written.py says where it need not be")
    if isinstance(value, list) and all(isinstance(item, int | float) for item in value):
        return statistics.median(value)
    return value


def older(result: dict[str, Any]) -> bool:
    """Whether it was measured before `SINCE`."""
    return _day(result["measured"]) < _day(SINCE)


def changed(result: dict[str, Any]) -> float | None:
    """Lines that were added or removed in the code that a result measures since its commit, or its day, ÷ its lines.

    None where the repository does not reach back so far.
    """
    day = time.strftime("%Y-%m-%d", _day(result["measured"]))
    since = _git("rev-parse", "--verify", "-q", f"{result['commit']}^{{commit}}")
    since = since or _git("rev-list", "-1", f"--before={day} 23:59:59", "HEAD")
    if not since:
        return None
    diff = _git("diff", "-M", "-w", "--numstat", since, "--", *result["measures"]).splitlines()
    rows = [line.split("\t") for line in diff if not line.startswith("-")]  # binary files have no lines
    files = [ROOT / file for file in _git("ls-files", *result["measures"]).splitlines()]
    lines = sum(file.read_bytes().count(b"\n") for file in files if file.exists())
    return sum(int(added) + int(removed) for added, removed, _ in rows) / lines


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


@cache
def _result(path: Path) -> Any:
    if not path.exists():
        raise RequestError(f"{path.name}: benchmarks/ has no such file; correct the place")
    return json.loads(path.read_text())


def _item(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    items = [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
    return next((item for item in items if set(key.split(" & ")) <= set(map(str, item.values()))), None)


def _day(text: str) -> time.struct_time:
    return time.strptime(text, "%d %B %Y")


def main() -> int:
    """Write the figures; returns the exit status."""
    try:
        for page in PAGES:
            text = page.read_text()
            if (new := renewed(text)) != text:
                write_atomic(page, new)
                print(f"{page.relative_to(ROOT)}: written")
    except RequestError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
