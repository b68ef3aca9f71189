"""Figures in prose, held to the results of benchmarks that they come from.

    .venv/bin/python -m scripts.figures       writes all figures of README.md and docs/ anew

A figure is a number, with ` %` where it is a fraction of 1, directly before a comment that says where its value is:
`1.24<!-- cost/recipes/gpt-tiny/frameworks/pytorch/marks/speed ÷ DDP, 2 ranks/ratio/median -->`, a file of benchmarks/
or docs/ and the keys in it. A key of a list is the value that one of an item's fields has. It is rounded as it is
written. An older result than `SINCE` is taken where the marker ends with its day, ` on 25 November 2026`, and the page
says it.

A table is what benchmarks/pages/tables/NAME.md.j2 makes of a part of a result, between `<!-- NAME FILE/KEY… -->`
and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import harness
from hvdkit.errors import RequestError
from hvdkit.files import write_atomic

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
# The day since which no change moves the speed of training. Whoever makes such a change sets it to the day of the
# change; then figures that were measured before it are refused.
SINCE = "28 November 2026"
_TABLE = re.compile(
    r"(?P<begin><!-- (?P<name>[\w-]+) (?P<place>[\w-]+(?:/[^>]+?)?(?: on [\w ]+)?) -->\n).*?(?P<end><!-- end -->)",
    re.DOTALL,
)
_FIGURE = re.compile(r"(?P<number>\d[\d,]*(?:\.(?P<decimals>\d+))?)(?P<percent> %)?<!-- (?P<place>[\w.-]+/[^>]+?) -->")


def renewed(text: str, benchmarks: Path = ROOT / "benchmarks") -> str:
    """The text with each figure and table as its result has it.

    Raises RequestError for a place that no result has, and for a result that is older than `SINCE` or whose parity was
    not checked or has failed.
    """

    said = " ".join(_TABLE.sub("", _FIGURE.sub("", text)).split())

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
        shown = f"{value:,.{len(match['decimals'] or '')}f}"
        return f"{shown}{match['percent'] or ''}<!-- {match['place']} -->"

    def table(match: re.Match[str]) -> str:
        made = harness.page(f"tables/{match['name']}", value_of(match))
        return f"{match['begin']}{made}{match['end']}"

    return _TABLE.sub(table, _FIGURE.sub(figure, text))


def looked_up(place: str, benchmarks: Path, day: str = "") -> Any:
    """The value at FILE/KEY/KEY…, of a result of that day or not older than `SINCE`; raises as `renewed` does."""
    name, *keys = place.split("/")
    found = [folder / f"{name}.json" for folder in (benchmarks, ROOT / "docs")]
    value = _result(next((path for path in found if path.exists()), found[0]))
    for key in [None, *keys]:
        value = value if key is None else _item(value, key)
        if value is None:
            raise RequestError(f"{place}: benchmarks/{name}.json has no `{key}` there; correct the place")
        if isinstance(value, dict):
            measured, parity = value.get("measured"), value.get("parity")
            if measured and (measured != day if day else _day(measured) < _day(SINCE)):
                raise RequestError(f"{place}: measured {measured}, and speeds have changed {SINCE}; measure it again")
            if isinstance(parity, dict) and not parity["passed"]:
                raise RequestError(f"{place}: its parity has failed; a speed counts only where it passes")
    return value


@cache
def _result(path: Path) -> Any:
    if not path.exists():
        raise RequestError(f"{path.name}: benchmarks/ has no such file; correct the place")
    return json.loads(path.read_text())


def _item(value: Any, key: str) -> Any:
    if isinstance(value, dict):
        return value.get(key)
    items = value if isinstance(value, list) else []
    return next((item for item in items if isinstance(item, dict) and key in item.values()), None)


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
