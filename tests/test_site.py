"""The site of README and docs/, in a real browser."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdkit import __version__
from scripts import site
from tests.browser import Browser, chromium
from tests.conftest import ROOT, run

WIDTH = 390  # CSS pixels of a phone


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this version's pages; MkDocs refuses pages with a link that leads nowhere."""
    folder: Path = tmp_path_factory.mktemp("site")
    done = run([sys.executable, "-m", "scripts.site", str(folder)], 120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder / "site" / __version__


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with chromium(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.mark.parametrize("pattern", ["p*.html", pytest.param("*.html", marks=pytest.mark.thorough)])
def test_no_page_is_cut_on_a_phone_and_the_dark_one_is_dark(pattern: str, made: Path, browser: Browser) -> None:
    pages, cut, faults = sorted(made.rglob(pattern)), [], {}
    assert len(pages) > 3
    for page in pages:
        shown = browser.open(page, WIDTH, 800, "dark")
        if shown.run("document.documentElement.scrollWidth") > WIDTH:
            cut.append(page.name)
        ground = shown.run("getComputedStyle(document.body).backgroundColor")
        assert max(map(int, re.findall(r"\d+", ground)[:3])) < 80, (page.name, ground)
        if found := shown.faults():
            faults[page.name] = found
    assert (cut, faults) == ([], {})


def test_no_link_and_no_picture_of_a_page_leads_nowhere(made: Path) -> None:
    """What MkDocs does not check: HTML in pages, scripts, styles, and anchors in all of them."""
    pages = {page: page.read_text() for page in made.rglob("*.html")}
    anchors = {page: set(re.findall(r'\b(?:id|name)="?([^"\s>]+)', text)) for page, text in pages.items()}
    dead = []
    for page, text in pages.items():
        for target in re.findall(r'(?:href|src)="([^"]*)"', text):
            path, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            led = (page.parent / path).resolve() if path else page
            if not led.exists() or (anchor and led in anchors and anchor not in anchors[led]):
                dead.append((page.name, target))
    assert dead == []


def test_each_version_stays_and_a_page_leads_to_all(made: Path, browser: Browser) -> None:
    older = made.parent / "0.0.10" / "index.html"
    older.parent.mkdir()
    older.write_text("<title>an older one</title>")
    assert site.listed(made.parent) == [__version__, "0.0.10"]
    page = browser.open(made / "docs" / "install.html")
    assert page.run("[...document.querySelector('select.version')].map(one => one.value)") == [__version__, "0.0.10"]
    assert page.run("document.querySelector('select.version').value") == __version__
    page.leave(
        "const menu = document.querySelector('select.version');"
        "menu.value = '0.0.10'; menu.dispatchEvent(new Event('change'))"
    )
    assert page.run("document.title") == "an older one"
    assert f'"{__version__}/index.html"' in (made.parent / "index.html").read_text()


def test_a_link_shows_the_title_of_its_page(tmp_path: Path) -> None:
    site.staged(tmp_path)
    index = (tmp_path / "docs" / "README.md").read_text()
    assert "[Training over a slow network](slow-network.md)" in index and ".md](" not in index


def test_it_is_found_by_words_and_loads_nothing_from_elsewhere(made: Path, browser: Browser) -> None:
    page = browser.open(made / "index.html")
    page.run("document.querySelector('[data-md-component=search-query]').focus()")
    page.run(
        "(box => {box.value = 'DiLoCo'; box.dispatchEvent(new Event('keyup'));"
        " box.dispatchEvent(new Event('input'))})(document.querySelector('[data-md-component=search-query]'))"
    )
    links = page.run_until("[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)")
    guide = next(number for number, link in enumerate(links) if "docs/slow-network.html" in link)
    assert not any("benchmarks/" in link for link in links[:guide]), "guides come before measurements"
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
