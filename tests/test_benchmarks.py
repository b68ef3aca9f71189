"""What the benchmarks share: each committed page is what its template makes of its JSON, and rounds are resumed."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import harness, memory, sharding, simulator, written
from hvdkit.recipe import schema
from tests.conftest import FRAMEWORKS, ROOT

pytestmark = pytest.mark.check

PAGES = sorted(path.name.removesuffix(".md.j2") for path in (ROOT / "benchmarks" / "pages").glob("*.md.j2"))


# Those that are measured by who has the machine for it.
MADE_ELSEWHERE = ("largest", "parallel", "validation", "validation-rows")


@pytest.mark.parametrize("name", [name for name in PAGES if name not in MADE_ELSEWHERE])
def test_a_committed_page_is_what_its_json_gives(name: str) -> None:
    outcome = json.loads((ROOT / "benchmarks" / f"{name}.json").read_text())
    assert written.page(name, outcome) == (ROOT / "benchmarks" / f"{name}.md").read_text()


MEASURED = json.loads((ROOT / "benchmarks" / "sharding.json").read_text())


def percent(page: str, words: str) -> int:
    """A figure of a page of the documentation: `words` has a group for it."""
    found = re.search(words, " ".join((ROOT / "docs" / page).read_text().split()))
    assert found, words
    return int(found[1])


def test_the_memory_of_sharding_is_what_was_measured() -> None:
    """What is counted today, beside the measured peaks; a change of either shows in the documentation's figure."""
    within = percent("sharding.md", r"On 2, 3 and 4 ranks `hvdkit memory` is within (\d+) % of the peak in each stage")
    errors = {}
    for row in MEASURED["memory"]:
        recipe = schema.load(ROOT / "recipes" / f"{sharding.RECIPE}.yaml", sharding.memory_keys(row["stage"]))
        shape = sharding.counting.sample_shape(recipe)
        total = sharding.counting.parts(recipe, shape, "pytorch", False, row["ranks"], row["stage"]).total
        errors[row["stage"], row["ranks"]] = row["peak_rss_mib"] / (total / 2**20) - 1
    sharded = [error for (stage, _), error in errors.items() if stage != "none"]
    assert {ranks for stage, ranks in errors if stage != "none"} == {2, 3, 4} and len(sharded) == 9
    assert within - 1 < 100 * max(map(abs, sharded)) <= within, errors


def test_the_bytes_of_sharding_are_what_was_measured() -> None:
    """By the count of today. A rank also sends heads of messages, and what the ranks agree on."""
    rows = MEASURED["speed"]
    assert {row["framework"] for row in rows} == set(FRAMEWORKS)
    for row in rows:
        recipe = schema.load(ROOT / "recipes" / f"{sharding.RECIPE}.yaml", sharding.MODELS[row["model"]][0])
        architecture = sharding.choose(recipe).architecture(None)
        count, once = sharding.parameter_count(architecture), sharding.counting.gathered_once(architecture)
        sent = 4 * sharding.sharding.values_sent(count, sharding.RANKS, row["stage"], once=once)
        assert 1 <= row["sent_bytes"]["median"] / sent < 1.02, row
        assert harness.judged(row["ratio"], row["limit"]) == row["verdict"] not in ("missed", "in doubt"), row


def test_the_foreseen_steps_of_sharding_are_as_near_as_documented() -> None:
    rows = MEASURED["foreseen"]
    assert {row["framework"] for row in rows} == set(FRAMEWORKS)
    assert percent("reference/simulation.md", r"predicted within \d+ % in all (\d+) cases") == len(rows)
    within = percent("reference/simulation.md", r"predicted within (\d+) % in all")
    pytorch = percent("reference/simulation.md", r"and within (\d+) % under PyTorch")
    for row in rows:
        errors = (
            100 * (row["predicted_ms"] / row["step_ms"] - 1),
            100 * (row["predicted_ratio"] / row["ratio"] - 1),
        )
        assert errors == pytest.approx((row["error_percent"], row["ratio_error_percent"]))
        assert max(map(abs, errors)) <= (pytorch if row["framework"] == "pytorch" else within), row


def test_the_sweep_that_is_timed_has_all_its_what_ifs() -> None:
    """`grid` asserts their number."""
    small = simulator.published.profile("resnet18", 1000, 64, "a100")
    simulator.grid(small, simulator.clusters.load(Path("aws-p3-16xlarge")))


def test_a_whole_round_is_read_and_half_a_round_starts_again(tmp_path: Path) -> None:
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


def test_a_command_that_fails_is_one_error_with_its_output() -> None:
    command = [sys.executable, "-c", "import sys; print('no such host'); sys.exit(int(sys.argv[1]))"]
    with pytest.raises(harness.RequestError, match=r"^no such host$"):
        harness.run([*command, "2"])
    with pytest.raises(harness.RunError, match=r"exit status 3: no such host$"):
        harness.run([*command, "3"])


def test_a_function_is_called_in_another_process() -> None:
    assert harness.elsewhere(harness.positive, text="3") == 3
    with pytest.raises(harness.RunError, match="expected 1 or more, got 0"):
        harness.elsewhere(harness.positive, text="0")


def test_memory_that_grows_is_told_from_memory_that_moves() -> None:
    steps = range(220, 2001, 20)
    moving = memory.growth([(step, 300.0 + (step // 20) % 3) for step in steps])
    assert abs(moving["growth_percent"]) < 0.5 and (moving["least_mib"], moving["most_mib"]) == (300.0, 302.0)
    leaking = memory.growth([(step, 300.0 + step / 128) for step in steps])
    assert leaking["kib_per_step"] == pytest.approx(8.0) and leaking["growth_percent"] > 2
