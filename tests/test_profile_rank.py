"""A rank's part in `hvdkit profile`: which steps it takes, what it marks, and what it knows of itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from hvdkit import tasks
from hvdkit.core import trace_events
from hvdkit.core.group import Mesh, Topology
from hvdkit.core.session import Session
from hvdkit.data.batches import open_dataset
from hvdkit.profiling import assemble
from hvdkit.recipe import schema
from hvdkit.worker import network_interface, profile, tuning
from hvdkit.worker.setup import RankScript, Setup
from tests import hygiene, local_adapter
from tests.conftest import ROOT
from tests.local_adapter import Linear


def test_a_rank_records_its_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's part, on the null adapter: every kind of step, with the marks in their order."""
    checked = schema.load(ROOT / "recipes" / "resnet20-digits.yaml")
    monkeypatch.setattr(tuning, "_applied", tuning.choose(checked, {}))  # which leaves the environment as it is
    recipe = checked.model_copy(update={"precision": "fp64", "warmup_steps": 2, "batch_size": 64})
    local: Any = local_adapter.adapter
    dataset = open_dataset(recipe.data, 10, 1)
    height, width, channels = dataset.shape
    session = Session(local, Linear(height * width * channels, 10), recipe.optimizer, recipe.loss)
    part = profile.ProfilePart(tmp_path, 8)
    task = tasks.choose(recipe)
    architecture = task.architecture(dataset.shape)
    begun = Setup(local, RankScript(Linear), recipe, Mesh(Topology()), dataset, task, architecture)
    profile.RankProfiler(begun, session, part, lambda phase, step: None).take_part()
    found = assemble.read(tmp_path, recipe)
    kinds = [step.kind for step in found.record.ranks[0].steps if step.turn >= 0]
    assert {kind: kinds.count(kind) for kind in kinds} == {"plain": 8, "marked": 8, "detailed": 3, "traced": 3}
    for step in found.record.ranks[0].steps:
        names = [name for name, _ in step.marks if not name.startswith(trace_events.READY)]
        order = [
            trace_events.OPEN,
            trace_events.STEP,
            trace_events.BEGIN,
            trace_events.INPUTS,
            trace_events.FORWARD,
            trace_events.BACKWARD,
            trace_events.REDUCED,
            trace_events.UPDATED,
            trace_events.END,
        ]
        assert names == ([] if step.kind == "plain" else order)
    made = assemble.profile(found, recipe)
    for step in [step for row in found.marked for step in row]:
        assert abs(sum(each.end - each.start for each in step.phases) - step.ns) <= 1, "the phases fill the step"
    assert {tensor.name for tensor in made.tensors} == {"fc.weight", "fc.bias"} and made.slowest is None
    assert not trace_events.recording()


@pytest.mark.check
def test_marks_cost_nothing_where_nobody_records() -> None:
    trace_events.record(False)
    trace_events.mark("x")
    assert trace_events.take() == []
    trace_events.record(True)
    trace_events.mark("b")
    trace_events.note("a", 1)
    assert [name for name, _ in trace_events.take()] == ["a", "b"]
    trace_events.record(False)


@pytest.mark.check
def test_turns_are_interleaved() -> None:
    found = profile.turns(10, 3)
    measured = [(turn.kind, turn.number, turn.steps) for turn in found if turn.kind in ("plain", "marked")][2:]
    assert [kind for kind, _, _ in measured] == ["plain", "marked", "marked", "plain"] * 2
    assert sum(steps for kind, _, steps in measured if kind == "marked") == 10
    assert found[0].steps == 3 and [turn.kind for turn in found[-2:]] == ["detailed", "traced"]


@pytest.mark.check
def test_turns_hold_whole_rounds() -> None:
    for steps, every, turns in ((20, 4, [8, 4, 4, 4]), (20, 16, [16, 16]), (8, 100, [100])):
        found = profile.turns(steps, 3, every)[2:]
        for kind in ("plain", "marked"):
            assert [turn.steps for turn in found if turn.kind == kind] == turns
        assert found[-1].kind == "traced" and found[-1].steps % every == 0


@pytest.mark.check
def test_what_an_interface_says_of_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_interface, "_INTERFACES", tmp_path)
    monkeypatch.setattr(network_interface, "_ROUTES", tmp_path / "route")
    monkeypatch.setattr(network_interface, "_TC_TIMEOUT_S", hygiene.patience(30))
    monkeypatch.delenv("HOROVOD_GLOO_IFACE", raising=False)
    (tmp_path / "wire0").mkdir()
    (tmp_path / "wire0" / "speed").write_text("10000\n")
    (tmp_path / "route").write_text("Iface\tDestination\nwire1\t0000000A\nwire0\t00000000\n")
    assert network_interface.interface() == "wire0" and network_interface.rate_mbit_per_s("wire0") == 10_000
    tc = tmp_path / "tc"
    tc.write_text(f'#!{sys.executable}\nprint(\'[{{"kind": "tbf", "options": {{"rate": 12500000}}}}]\')\n')
    tc.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert network_interface.rate_mbit_per_s("wire0") == 100
    tc.write_text("#!/bin/sh\necho damaged\n")
    assert network_interface.rate_mbit_per_s("wire0") == 10_000
    monkeypatch.setenv("HOROVOD_GLOO_IFACE", "lo")
    assert network_interface.interface() == "lo" and network_interface.rate_mbit_per_s("lo") is None
