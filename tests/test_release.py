"""What a release says of itself: one version and one date, everywhere, and extras that are there."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from datetime import date
from pathlib import Path

import pytest
import yaml

import hvdkit
from scripts import release
from tests.conftest import ROOT

pytestmark = pytest.mark.check

SAYING = ("CHANGELOG.md", "CITATION.cff", "hvdkit/__init__.py")
HEADING = f"## {hvdkit.__version__} ("


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """What `faults` reads, to be spoiled; what is not released yet is left out."""
    (tmp_path / "hvdkit").mkdir()
    for name in SAYING:
        shutil.copy(ROOT / name, tmp_path / name)
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text("# Changelog\n\n" + changes.read_text()[changes.read_text().index(HEADING) :])
    return tmp_path


def test_version_changelog_and_citation_say_the_same() -> None:
    assert release.version_of(ROOT) == hvdkit.__version__
    assert [fault for fault in release.faults(ROOT) if "Unreleased" not in fault] == []


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        ("hvdkit/__init__.py", hvdkit.__version__, "9.9.9", "expected the heading '## 9.9.9 (YYYY-MM-DD)' first"),
        ("CITATION.cff", f"\nversion: {hvdkit.__version__}", "\nversion: 0.1", "CITATION.cff: version: expected"),
        ("CITATION.cff", "date-released: 20", "date-released: 19", "CITATION.cff: date-released: expected"),
        ("CHANGELOG.md", HEADING, f"## Unreleased\n\n- new\n\n{HEADING}", "Unreleased has entries"),
        ("CHANGELOG.md", HEADING, "## next (", "expected the heading"),
    ],
)
def test_what_differs_is_named(copy: Path, file: str, old: str, new: str, fault: str) -> None:
    text = (copy / file).read_text()
    assert text.count(old) == 1
    (copy / file).write_text(text.replace(old, new))
    assert any(fault in line for line in release.faults(copy)), release.faults(copy)


def test_an_empty_unreleased_is_no_fault(copy: Path) -> None:
    text = (copy / "CHANGELOG.md").read_text()
    (copy / "CHANGELOG.md").write_text(text.replace(HEADING, f"## Unreleased\n\n{HEADING}"))
    assert release.faults(copy) == []


def test_what_is_not_committed_is_not_released(copy: Path) -> None:
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True, timeout=60)
    assert release.uncommitted(copy)[0].startswith("3 files are not committed, such as CHANGELOG.md; ")


def test_the_citation_is_valid() -> None:
    """The rules of Citation File Format 1.2.0 that it can break; the whole schema has accepted it once."""
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software" and citation["license"] == "Apache-2.0"
    assert isinstance(citation["version"], str) and isinstance(citation["date-released"], date)
    for work in (citation, *citation["references"]):
        assert isinstance(work["title"], str) and work["type"] in ("software", "article")
        for author in work["authors"]:
            assert author.keys() == {"name"} or author.keys() == {"family-names", "given-names"}


def test_extras_that_pages_and_messages_name_are_there() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    known, named = set(setup["options.extras_require"]), {}
    for folder, suffix in (("docs", ".md"), ("hvdkit", ".py"), ("scripts", ".py"), (".", ".md"), (".", "Makefile")):
        for path in (ROOT / folder).glob(f"*{suffix}") if folder == "." else (ROOT / folder).rglob(f"*{suffix}"):
            for words in re.findall(r"(?:hvdkit|['\"]\.)\[([a-z, ]+)\]", path.read_text(encoding="utf-8")):
                named |= {word.strip(): path.name for word in words.split(",")}
    assert {"ray", "docs", "wandb", "mlflow", "dev"} <= named.keys()
    assert named.keys() <= known, {word: named[word] for word in named.keys() - known}


def test_the_tools_of_tests_are_pinned() -> None:
    """Each to one version; what users may install too has its range in an extra of its own."""
    setup = configparser.RawConfigParser()
    setup.read(ROOT / "setup.cfg")
    tools = [line for line in setup["options.extras_require"]["dev"].split("\n") if line and not line.startswith("%")]
    assert len(tools) > 10 and [line for line in tools if "==" not in line] == []
