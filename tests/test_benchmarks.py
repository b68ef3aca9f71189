"""What the benchmarks share: each committed page is what its template makes of its JSON, and rounds are resumed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from conftest import FRAMEWORKS, ROOT

pytestmark = pytest.mark.check

PAGES = sorted(path.name.removesuffix(".md.j2") for path in (ROOT / "benchmarks" / "pages").glob("*.md.j2"))


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import harness

    yield harness
    for name in ("harness", "hosts"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", [name for name in PAGES if name != "validation"])
def test_a_committed_page_is_what_its_json_gives(harness: ModuleType, name: str) -> None:
    outcome = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    assert harness.page(name, outcome) == (ROOT / "benchmarks" / f"{name}.md").read_text()


def test_the_frameworks_are_the_tests(harness: ModuleType) -> None:
    assert tuple(FRAMEWORKS) == harness.FRAMEWORKS


def test_a_whole_round_is_read_and_half_a_round_starts_again(harness: ModuleType, tmp_path: Path) -> None:
    ran: list[str] = []

    def run(side: str, folder: Path) -> float:
        ran.append(side)
        folder.mkdir()
        if len(ran) == 2:
            raise KeyboardInterrupt
        return float(len(side))

    with pytest.raises(KeyboardInterrupt):
        harness.one_round(tmp_path / "00", ("plain", "hvdkit"), run)
    whole = {"plain": 5.0, "hvdkit": 6.0}
    assert harness.one_round(tmp_path / "00", ("plain", "hvdkit"), run) == whole
    assert len(ran) == 4
    assert harness.one_round(tmp_path / "00", ("hvdkit",), run) == {"hvdkit": 6.0}
    assert len(ran) == 4


def test_a_command_that_fails_is_one_error_with_its_output(harness: ModuleType) -> None:
    command = [sys.executable, "-c", "import sys; print('no such host'); sys.exit(int(sys.argv[1]))"]
    with pytest.raises(harness.RequestError, match=r"^no such host$"):
        harness.run([*command, "2"])
    with pytest.raises(harness.RunError, match=r"exit status 3: no such host$"):
        harness.run([*command, "3"])


def test_a_function_is_called_in_another_process(harness: ModuleType) -> None:
    assert harness.elsewhere(harness.positive, text="3") == 3
    with pytest.raises(harness.RunError, match="expected 1 or more, got 0"):
        harness.elsewhere(harness.positive, text="0")
