"""The site of README and docs/, in a real browser."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts import site
from tests.browser import Browser, chromium
from tests.conftest import ROOT

WIDTH = 390  # CSS pixels of a phone


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a site; MkDocs refuses one with a link that leads nowhere."""
    folder: Path = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "scripts.site", folder], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.mark.parametrize("pattern", ["p*.html", pytest.param("*.html", marks=pytest.mark.thorough)])
def test_no_page_is_cut_on_a_phone(pattern: str, made: Path, browser: Browser) -> None:
    pages, cut = sorted(made.rglob(pattern)), []
    assert len(pages) > 3
    for page in pages:
        shown = browser.open(page, WIDTH, 800, "dark")
        if shown.run("document.documentElement.scrollWidth") > WIDTH:
            cut.append(page.name)
    assert cut == []


def test_it_is_found_by_words_and_loads_nothing_from_elsewhere(made: Path, browser: Browser) -> None:
    page = browser.open(made / "index.html")
    page.run("document.querySelector('[data-md-component=search-query]').focus()")
    page.run(
        "(box => {box.value = 'Local SGD'; box.dispatchEvent(new Event('keyup'));"
        " box.dispatchEvent(new Event('input'))})(document.querySelector('[data-md-component=search-query]'))"
    )
    found = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
    for _ in range(100):
        page.settle()
        if links := page.run(found):
            break
    assert any("slow-network.html" in link for link in links), links
    assert [request for request in page.requests() if not request.startswith(("file:", "blob:"))] == []


def test_each_page_is_in_the_menu() -> None:
    menu = (ROOT / "docs" / "site.yml").read_text()
    pages = [page.relative_to(ROOT) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f": {page}\n" not in menu] == []


def test_the_index_leads_to_each_page() -> None:
    """Links of docs/README.md, which readers see first on a host of repositories."""
    index = (ROOT / "docs" / "README.md").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert [page for page in pages if f"]({page})" not in index and page != "README.md"] == []


def test_a_link_to_a_folder_becomes_text(tmp_path: Path) -> None:
    files = site.staged(tmp_path)
    assert ROOT / "docs" / "images" / "report.png" in files
    assert "](../hvdkit/runtimes/patches)" not in (tmp_path / "docs" / "horovod.md").read_text()
