"""docs/worked-case.md shows what the commands print: the same words, and figures within a hundredth."""

from __future__ import annotations

import re

import pytest

from scripts import worked_case

pytestmark = pytest.mark.check
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def test_the_page_shows_what_the_commands_print() -> None:
    """Another processor may round the last digit otherwise."""
    written, printed = worked_case.PAGE.read_text().splitlines(), worked_case.page().splitlines()
    told = "run `python -m scripts.worked_case`, and see whether the decision still follows"
    assert len(written) == len(printed), told
    for line, now in zip(written, printed, strict=True):
        assert NUMBER.sub("#", " ".join(line.split())) == NUMBER.sub("#", " ".join(now.split())), told
        figures = [[float(each.replace(",", "")) for each in NUMBER.findall(text)] for text in (line, now)]
        assert figures[0] == pytest.approx(figures[1], rel=0.01, abs=0.011), (told, line, now)
