"""docs/reference/: what the program declares, and nothing else."""

from __future__ import annotations

import pytest

from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.commands import COMMANDS
from scripts import reference

pytestmark = pytest.mark.check


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_page_is_up_to_date(name: str) -> None:
    assert (reference.FOLDER / name).read_text() == reference.PAGES[name](), "run `python -m scripts.schemas`"


def test_all_commands_and_capabilities_are_there() -> None:
    text = reference.commands()
    assert [name for name in COMMANDS if f"### hvdkit {name}\n" not in text] == []
    cells = {row.split(" | ")[0]: row for row in reference.frameworks().splitlines() if row.startswith("| ")}
    recompute = cells["| `recompute`"].split(" | ")[1:]
    assert [cell.strip(" |") for cell in recompute] == [
        "yes" if "recompute" in CAPABILITIES[name] else "no" for name in ("pytorch", "tensorflow", "keras", "mxnet")
    ]
