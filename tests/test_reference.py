"""docs/reference/: what the program declares, and nothing else; docs/: how long it is."""

from __future__ import annotations

import re

import pytest
import yaml

from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.commands import COMMANDS
from scripts import reference
from tests.conftest import ROOT

pytestmark = pytest.mark.check


def test_all_commands_and_capabilities_are_there() -> None:
    text = reference.commands()
    assert [name for name in COMMANDS if f"### hvdkit {name}\n" not in text] == []
    cells = {row.split(" | ")[0]: row for row in reference.frameworks().splitlines() if row.startswith("| ")}
    recompute = cells["| `recompute`"].split(" | ")[1:]
    assert [cell.strip(" |") for cell in recompute] == [
        "yes" if "recompute" in CAPABILITIES[name] else "no" for name in ("pytorch", "tensorflow", "keras", "mxnet")
    ]


def test_what_is_no_reference_can_be_read_in_an_afternoon() -> None:
    """Words of tutorials, how-to and concepts, as docs/site.yml sorts them, without pages that a command writes."""
    menu = yaml.safe_load((ROOT / "docs" / "site.yml").read_text())["nav"]
    groups = {name: pages for entry in menu for name, pages in entry.items() if isinstance(pages, list)}
    assert list(groups) == ["Tutorials", "How to", "Concepts", "Reference"]
    words = 0
    for page in (path for name in list(groups)[:3] for entry in groups[name] for path in entry.values()):
        if page not in ("docs/validation.md", "docs/worked-case.md"):
            text = re.sub(r"<!--.*?-->", "", (ROOT / page).read_text(), flags=re.DOTALL)
            words += sum(any(map(str.isalnum, word)) for word in text.split())
    assert words <= 32_000
