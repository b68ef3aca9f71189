"""Figures in prose are those of the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from hvdkit.errors import RequestError
from scripts import draw_front, figures

pytestmark = pytest.mark.check
RESULT = {
    "measured": "28 November 2026",
    "parity": {"passed": True},
    "rows": [{"what": "speed ÷ DDP", "ratio": 1.2371, "bytes": 12345678}],
}


def kept(folder: Path, **changes: object) -> Path:
    """A folder with RESULT in speed.json."""
    (folder / "speed.json").write_text(json.dumps(RESULT | changes))
    return folder


@pytest.mark.parametrize("page", figures.PAGES, ids=lambda page: page.name)
def test_each_figure_of_a_page_is_that_of_its_result(page: Path) -> None:
    text = page.read_text()
    assert figures.renewed(text) == text, "run python -m scripts.figures"


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
        ("speed/rows/speed ÷ DDP/ratio", {"parity": {"passed": False}}, "parity"),
    ],
)
def test_what_no_result_backs_is_refused(place: str, changes: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message):
        figures.renewed(f"1.2<!-- {place} -->", kept(tmp_path, **changes))
