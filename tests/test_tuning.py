"""What a run chooses by itself: by rule, by short runs, and what stands in its result of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdkit.commands import tune
from hvdkit.commands.checked_run import make_plan
from hvdkit.commands.tune import RULE
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema
from hvdkit.results.train import read_result
from hvdkit.runtimes import machine
from hvdkit.worker import tuning
from tests.conftest import ROOT, run

pytestmark = pytest.mark.check

DIGITS = ROOT / "recipes" / "resnet20-digits.yaml"


def chosen(environment: dict[str, str] | None = None, *overrides: str) -> dict[str, Any]:
    """What is chosen for the digits, by the variables' short names."""
    choices = tuning.choose(schema.load(DIGITS, overrides), environment or {})
    return {name.removeprefix("HOROVOD_"): choice.value for name, choice in choices.items()}


def test_by_rule() -> None:
    assert chosen() == {"IDLE_CYCLE_TIME": 100, "CYCLE_TIME": 5, "FUSION_THRESHOLD": None, "CACHE_CAPACITY": None}
    assert chosen({}, "tune=none")["IDLE_CYCLE_TIME"] is None
    assert chosen({}, "device=gpu")["IDLE_CYCLE_TIME"] is None
    assert chosen({"HOROVOD_CYCLE_TIME": "3"})["IDLE_CYCLE_TIME"] is None  # whoever gives a cycle time gets it
    assert chosen({}, "elastic={max_np: 2}")["IDLE_CYCLE_TIME"] == 100
    assert chosen({}, "tune=none")["CYCLE_TIME"] is None
    assert chosen({}, "device=gpu")["CYCLE_TIME"] is None
    assert chosen({"HOROVOD_CYCLE_TIME": "3"})["CYCLE_TIME"] == "3"


def test_a_word_for_shared_memory_is_refused() -> None:
    """Horovod takes each for a 0."""
    assert not any(tuning.faults({} if text is None else {tuning.SHARED: text}) for text in (None, "0", "1"))
    (line,) = tuning.faults({tuning.SHARED: "true"})
    assert line.startswith("HOROVOD_SHARED_MEMORY: expected 0 (sockets) or 1 (memory), got 'true'")


def test_a_large_networks_gradients_fit_into_one_reduction() -> None:
    large = chosen({}, "model.name=resnet152")
    assert large["FUSION_THRESHOLD"] == 8 * 58_164_298  # parameters with 10 classes
    assert large["CACHE_CAPACITY"] > 1024


def test_a_launcher_leaves_a_rank_nothing_to_change() -> None:
    recipe = schema.load(DIGITS, ["model.name=resnet152"])
    given = tuning.environment(recipe, {"HOROVOD_CYCLE_TIME": "3"})
    there = {"HOROVOD_CYCLE_TIME": "3", **given}
    again = tuning.choose(recipe, there)
    values = {name: str(choice.value) for name, choice in again.items() if choice.value is not None}
    assert len(values) == 3 and values.items() <= there.items()
    assert again == tuning.choose(recipe, {"HOROVOD_CYCLE_TIME": "3"})


def test_what_was_measured_counts_only_where_it_is_in_force() -> None:
    found = json.dumps({"HOROVOD_CYCLE_TIME": {"value": 10, "why": "measured"}})
    recipe = schema.load(DIGITS)
    force = tuning.choose(recipe, {"HOROVOD_CYCLE_TIME": "10", tuning.CHOSEN: found})
    assert force["HOROVOD_CYCLE_TIME"] == tuning.Choice(10, "measured")
    other = tuning.choose(recipe, {"HOROVOD_CYCLE_TIME": "2", tuning.CHOSEN: found})
    assert other["HOROVOD_CYCLE_TIME"].why == "set in the environment"


@pytest.mark.parametrize(
    ("speeds", "best"),
    [
        ({RULE: [100.0, 100.0, 100.0], "2": [100.0, 101.0, 99.0], "5": [101.0, 101.0, 101.0]}, RULE),  # 1 % is luck
        (
            {RULE: [100.0, 100.0, 100.0], "2": [100.0, 101.0, 99.0], "5": [110.0, 90.0, 109.0]},
            "5",
        ),  # the median decides
        ({RULE: [100.0], "2": [130.0], "5": [110.0]}, "2"),
    ],
)
def test_the_rules_choice_stays_unless_another_is_faster(speeds: dict[str, list[float]], best: str) -> None:
    found, why = tune.choose(speeds, "tokens")
    assert found == best and f"tokens/s, medians of {len(speeds[RULE])} short runs" in why


# The command line with one round of two short runs.
IN_ONE_ROUND = "from hvdkit.commands import tune; tune.ROUNDS = 1; tune.SETTINGS = dict([*tune.SETTINGS.items()][:2]); "
IN_ONE_ROUND += "from hvdkit.__main__ import main; main()"


@pytest.mark.usefixtures("warm")
@pytest.mark.ranks
def test_short_runs_choose_and_are_told(tmp_path: Path) -> None:
    out = tmp_path / "out"
    settings = ("tune=measure", "model.name=resnet8", "batch_size=4", "steps=5")
    command = [sys.executable, "-c", IN_ONE_ROUND, "train", str(DIGITS), "--framework", "mxnet", "-np", "2"]
    done = run([*command, "--out", str(out), *settings], 120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tuning, round 1 of 1") == 2
    told = read_result(out / "result.json").tuning or {}
    choices = {name: str(told[name]["value"]) for name in (tuning.IDLE, tuning.CYCLE)}
    assert choices in [{tuning.IDLE: "100", tuning.CYCLE: "5"}, *tune.SETTINGS.values()]
    assert all("measured before the run" in told[name]["why"] for name in choices)
    assert {path.name for path in out.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "logs",
        "metrics.jsonl",
        "metrics.csv",
        "result.json",
    }


@pytest.mark.parametrize("extra", [["-np", "1"], ["-np", "2", "device=gpu"], ["-np", "2", "elastic={max_np: 2}"]])
def test_nothing_is_searched_where_nothing_can_be_found(extra: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ["GPU 0", "GPU 1"])
    recipe = schema.load(DIGITS, ["tune=measure", *extra[2:]])
    plan = make_plan(recipe, "mxnet", Placement(int(extra[1])))
    assert not tune.searches(plan) and tune.measured(plan, Path("/nowhere")) is plan
