"""Figures in prose are those of the results."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from hvdkit.errors import RequestError
from scripts import draw_front, figures
from tests.conftest import ROOT

pytestmark = pytest.mark.check
RESULT = {
    "measured": "28 November 2026",
    "parity": {"passed": True},
    "rows": [
        {"what": "speed ÷ DDP", "ranks": 2, "ratio": 1.2371, "bytes": 12345678},
        {"what": "speed ÷ DDP", "ranks": 4, "ratio": 1.5, "seconds": [4.0, 2.0, 3.0]},
    ],
    "error": 1.8764e-12,
}
# What says that a number was measured, and a number with a unit. Of confidences and settings the units are others.
MEASURED = re.compile(r"\b(medians?|interleaved|EPYC|Xeon|\d+ November 2026)\b")
NUMBER = re.compile(r"(?!95 %|94 %|75 %|90 %)\b\d[\d.,]*\s?(?:%|ms\b|s\b|seconds\b|MiB\b|GB\b|images/s|×|times\b)|10⁻")
# Pages that a command writes, with tests of their own.
WRITTEN = {
    "validation.md": "test_validation.py",
    "worked-case.md": "test_worked_case.py",
    "patches.md": "test_reference.py",
}


def kept(folder: Path, **changes: object) -> Path:
    """A folder with RESULT in speed.json."""
    (folder / "speed.json").write_text(json.dumps(RESULT | changes))
    return folder


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_each_figure_of_a_page_is_that_of_its_result(page: Path) -> None:
    text = page.read_text()
    assert figures.renewed(text) == text, "run python -m scripts.figures"


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_the_page_of_each_result_is_one_click_away_with_machine_date_and_number_of_runs(page: Path) -> None:
    text = page.read_text()
    for name in figures.results(text) - {"validation"}:
        linked = [ROOT / "benchmarks" / f"{file}.md" for file in (name, "notes") if f"benchmarks/{file}.md" in text]
        assert linked, f"{page.name} has figures of {name}.json and no link to benchmarks/{name}.md"
        result, told = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text()), linked[0].read_text()
        assert result["measured"] in told and result["machine"]["processor"].split("(")[0] in told, linked[0].name
        assert re.search(r"rounds|runs|seeds|check of each", told), linked[0].name


def paragraphs(text: str) -> list[str]:
    """Paragraphs, items and rows of a page's prose, without code, and without figures that come from results."""
    text = re.sub(
        r"`[^`\n]+`", "", re.sub(r"^ *(`{3,}).*?^ *\1", "", figures.prose(text), flags=re.DOTALL | re.MULTILINE)
    )
    return [" ".join(part.split()) for part in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) )", text)]


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_a_figure_that_was_measured_has_a_marker(page: Path) -> None:
    """Or `<!-- held by tests/FILE.py -->`, where a test compares it in a way of its own."""
    if page.name in WRITTEN:
        assert (ROOT / "tests" / WRITTEN[page.name]).exists()
        return
    parts = paragraphs(page.read_text())
    held = [match[1] for part in parts for match in re.finditer(r"<!-- held by (\S+) -->", part)]
    assert all((ROOT / file).exists() for file in held)
    bare = [part for part in parts if MEASURED.search(part) and NUMBER.search(part) and "<!-- held by" not in part]
    assert bare == [], "give it a marker (scripts/figures.py), or put it into benchmarks/notes.md"


def test_a_figure_without_a_marker_is_seen() -> None:
    measured = "Medians on two cores of an AMD EPYC: 1.2 times as fast."
    for text, seen in {measured: 1, f"`{measured}`": 0, "A 95 % interval of medians": 0}.items():
        assert len([part for part in paragraphs(text) if MEASURED.search(part) and NUMBER.search(part)]) == seen


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("*.json")))
def test_a_result_of_today_measures_the_code_of_today(name: str) -> None:
    result = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    if name != "horovod-matrix":  # of compilers: it is in no page's prose
        assert all((ROOT / path).exists() for path in result["measures"])
    if "measured" not in result or figures.older(result):
        return
    changed = figures.changed(result)
    if changed is None:
        pytest.skip("the repository does not reach back to the day of this result")
    assert changed <= figures.CHANGED_AT_MOST, (
        f"{changed:.0%} of the code that {name}.json measures has changed since {result['commit']}:"
        " run its command, or set SINCE in scripts/figures.py and say the day on each page"
    )


def test_bench_all_measures_each_result_that_pages_quote() -> None:
    quoted = set().union(*(figures.results(page.read_text()) for page in figures.PAGES))
    measured = re.findall(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[0].split()
    # `make validate` makes validation, and order.json has runs of several commands
    assert quoted - {"validation", "order"} <= set(measured)


def test_bench_all_continues_after_what_has_a_result(tmp_path: Path) -> None:
    """`start` fails, and the next one runs; `ways` misses a limit, and has a result."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "python").write_text(
        "#!/bin/sh\necho $2 >>ran\n"
        "case $2 in *.start) exit 2;; *.ways) sleep 0.02; touch benchmarks/ways.json; exit 1;; esac\n"
    )
    (tmp_path / "python").chmod(0o755)

    def make() -> int:
        goals = [f"runs/bench-all/{name}.done" for name in ("tools", "start", "ways")]
        command = ["make", "-s", "-k", "-C", tmp_path, "-f", ROOT / "Makefile", f"BIN={tmp_path}", *goals]
        return subprocess.run(command, capture_output=True, timeout=100).returncode

    assert make() != 0
    assert make() != 0
    ran = (tmp_path / "ran").read_text().split()
    assert ran == ["benchmarks.tools", "benchmarks.start", "benchmarks.ways", "benchmarks.start"]


def test_the_readme_has_figures_of_today_alone() -> None:
    assert not re.search(r" on \d+ \w+ \d{4} -->", figures.PAGES[0].read_text())


def test_the_age_of_a_result_is_the_share_of_changed_lines() -> None:
    code = {"measured": "28 November 2026", "commit": "HEAD", "measures": ["benchmarks/notes.md", "LICENSE"]}
    assert figures.changed(code) in (None, pytest.approx(0, abs=0.5))
    assert figures.changed(code | {"measured": "1 January 2020", "commit": "none"}) is None


def test_the_readmes_picture_has_the_figures_of_today() -> None:
    with Image.open(draw_front.OUT) as picture:
        shown = json.loads(picture.info["Description"])
    assert shown == draw_front.figures(), "run python -m scripts.draw_front"


def test_the_readme_has_figures() -> None:
    assert figures.PAGES[0].read_text().count("<!-- cost/") >= 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.30<!-- {} -->", "1.24<!-- {} -->"),
        ("1<!-- {} --> a", "1<!-- {} --> a"),
        ("99 %<!-- {} -->", "124 %<!-- {} -->"),
        ("9.9 × 10⁻⁹<!-- speed/error -->", "1.9 × 10⁻¹²<!-- speed/error -->"),
        ("9<!-- speed/rows/speed ÷ DDP & 4/seconds -->", "3<!-- speed/rows/speed ÷ DDP & 4/seconds -->"),
    ],
)
def test_a_figure_is_rounded_as_it_is_written(text: str, expected: str, tmp_path: Path) -> None:
    place = "speed/rows/speed ÷ DDP/ratio"
    assert figures.renewed(text.format(place), kept(tmp_path)) == expected.format(place)


def test_thousands_have_commas(tmp_path: Path) -> None:
    place = "speed/rows/speed ÷ DDP/bytes"
    assert figures.renewed(f"1<!-- {place} -->", kept(tmp_path)) == f"12,345,678<!-- {place} -->"


def test_an_older_result_is_taken_where_marker_and_page_say_its_day(tmp_path: Path) -> None:
    day, place = "1 November 2026", "speed/rows/speed ÷ DDP/ratio on 1 November 2026"
    folder = kept(tmp_path, measured=day)
    text = f"1.24<!-- {place} --> (measured {day})"
    assert figures.renewed(text, folder) == text
    for wrong in (f"1.24<!-- {place} -->", text.replace("1 November", "2 November")):
        with pytest.raises(RequestError, match="November 2026"):
            figures.renewed(wrong, folder)


@pytest.mark.parametrize(
    ("place", "changes", "message"),
    [
        ("none/rows", {}, "none.json"),
        ("speed/rows/speed ÷ FSDP/ratio", {}, "speed ÷ FSDP"),
        ("speed/rows", {}, "expected a number"),
        ("speed/rows/speed ÷ DDP/ratio", {"measured": "1 November 2026"}, "1 November 2026"),
        ("speed/rows/speed ÷ DDP/ratio", {"measured": None}, "when"),
        ("speed/rows/speed ÷ DDP/ratio", {"parity": {"passed": False}}, "parity has failed"),
        ("speed/rows/speed ÷ DDP/ratio", {"parity": None}, "parity was not checked"),
    ],
)
def test_what_no_result_backs_is_refused(place: str, changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        figures.renewed(f"1.2<!-- {place} -->", kept(tmp_path, **changes))
