"""The pages' links: each leads to a file of the checkout and, with an anchor, to one of its headings."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.check

LINK = re.compile(r"\]\(([^)\s#]*)(?:#([^)\s]+))?\)")
BLOCK, CODE = re.compile(r"```.*?```", re.DOTALL), re.compile(r"`[^`\n]*`")
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    dead = []
    for target, anchor in LINK.findall(CODE.sub("", BLOCK.sub("", page.read_text()))):
        file = page.parent / target if target else page
        if ":" not in target and (
            not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file))
        ):
            dead.append(f"{target}#{anchor}")
    assert dead == []


def test_pages_that_the_program_names_are_there() -> None:
    """In messages, descriptions of keys and comments."""
    files = [*(ROOT / "hvdkit").rglob("*.py"), *(ROOT / "recipes").glob("*.yaml")]
    name = re.compile(r"\b((?:docs|benchmarks)/[\w/-]+\.md)(?:#([\w-]+))?")
    named = {found for file in files for found in name.findall(file.read_text())}
    assert {"docs/troubleshooting.md", "docs/own-model.md", "docs/fine-tuning.md"} <= {page for page, _ in named}
    dead = [page for page, _ in named if not (ROOT / page).exists()]
    assert dead == []
    assert [page for page, anchor in named if anchor and anchor not in anchors(ROOT / page)] == []
