"""DeepSpeed trains the same recipe, in a runtime of its own that `hvdkit runtime build` makes where it is named."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from hvdkit.commands import parity_verdict
from hvdkit.results.parity import Parity
from hvdkit.results.train import TrainResult
from hvdkit.runtimes import pins, store
from tests.conftest import ROOT, Hvdkit, run

RECIPE = ROOT / "recipes" / "gpt-tiny.yaml"
SMALL = ("model.layers=2", "model.width=32", "model.heads=2", "data.validation=0.001", "threads=1")
TRAIN = ("--framework", "pytorch", "-np", "2", "accumulate=2", "checkpoint={}", *SMALL)


@pytest.fixture(scope="module")
def deepspeed() -> None:
    if store.load("deepspeed") is None:
        pytest.skip("needs DeepSpeed: hvdkit runtime build deepspeed")


@pytest.mark.check
def test_without_its_runtime_the_command_that_builds_it_is_named(inside: Hvdkit, tmp_path: Path) -> None:
    words = ("--framework", "pytorch", "-np", 2, "--rival", "deepspeed", "sharding=gradients", "--out", "run")
    done = inside("train", RECIPE, *words, HVDKIT_RUNTIMES=str(tmp_path / "none"))
    assert done.returncode == 2 and "run `hvdkit runtime build deepspeed`" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.check
def test_its_runtime_has_the_pytorch_that_it_is_compared_with() -> None:
    own, theirs = pins.RUNTIMES["pytorch"], pins.BASELINES["deepspeed"]
    assert set(own.packages(gpu=False)) < set(theirs.packages(gpu=False))
    assert (theirs.sources, pins.framework_of("deepspeed")) == (("deepspeed==0.19.8",), "pytorch")
    assert all("==" in package for package in (*theirs.packages(gpu=False), *theirs.sources))
    assert set(pins.RUNTIMES) == set(pins.FRAMEWORKS.values()), "only these are built where none is named"


@pytest.mark.check
def test_in_float32_each_tensor_has_a_limit_of_its_own() -> None:
    """A tensor that rounding alone decides excuses no other one."""
    noisy = [{"attn.bias": 0.2, "mlp.weight": 2e-6}]
    assert parity_verdict.excess(noisy, noisy) == pytest.approx(1 / 3)
    assert parity_verdict.excess([{"attn.bias": 0.5, "mlp.weight": 9e-6}], noisy) <= 1, (
        "within a hundred times the rounding"
    )
    assert parity_verdict.excess([{"attn.bias": 0.2, "mlp.weight": 2e-5}], noisy) == pytest.approx(2)
    assert parity_verdict.excess([{"attn.bias": 0.2, "other": 1e300}], noisy) > 1e300


@pytest.mark.usefixtures("deepspeed")
@pytest.mark.timeout(400)
def test_deepspeed_computes_what_hvdkit_computes(hvdkit: Hvdkit, tmp_path: Path) -> None:
    """In float32, which it has alone: as near to the reference in float64 as plain Horovod in float32."""
    words = ("--framework", "pytorch", "-np", 2, "--rival", "deepspeed", "--steps", 3, "sharding=gradients")
    done = hvdkit("parity", RECIPE, *words, "--out", "run", *SMALL, timeout=300)
    found = Parity.model_validate_json((tmp_path / "run" / "parity.json").read_text())
    assert done.returncode == 0, done.stdout + done.stderr
    own, each = found.frameworks["pytorch"], found.frameworks["pytorch-deepspeed"]
    assert own.f32_excess is None and own.step_f64 < 1e-12
    assert each.f32_excess is not None and max(each.f32_excess.values()) <= 1.0
    assert each.initial_weights_equal and 1e-9 < each.logits_f64 < 1e-5, "float32 against float64"
    assert "in float32" in done.stdout and "trains in float32 alone" in (tmp_path / "run" / "parity.md").read_text()
    rewritten = json.loads((tmp_path / "run" / "parity.json").read_text())
    rewritten["frameworks"]["pytorch-deepspeed"]["f32_excess"]["step_f64"] = 1.5
    (tmp_path / "other.json").write_text(json.dumps(rewritten))
    words = ("--framework", "pytorch", "-np", 2, "--rival", "deepspeed", "--parity", "other.json")
    done = hvdkit("compare", RECIPE, *words, "--out", "c", "sharding=gradients", *SMALL)
    assert done.returncode == 2 and "its verdict does not match its errors and limits" in done.stderr


@pytest.fixture(scope="module")
def own(deepspeed: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of hvdkit itself."""
    folder = tmp_path_factory.mktemp("own")
    done = run(
        [sys.executable, "-m", "hvdkit", "train", str(RECIPE), *TRAIN, "--out", "run", "steps=3"], 120, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("rival", "sharding"),
    [("deepspeed", "optimizer"), ("deepspeed", "parameters"), ("deepspeed_offload", "gradients")],
)
def test_each_stage_trains_alike_and_holds_its_share(
    rival: str, sharding: str, hvdkit: Hvdkit, tmp_path: Path, own: Path
) -> None:
    """With accumulation; evaluated, and written as one checkpoint."""
    words = ("--rival", rival, "--out", "run", "steps=3", f"sharding={sharding}")
    done = hvdkit("train", RECIPE, *TRAIN, *words, timeout=200)
    assert done.returncode == 0, done.stderr
    wanted, found = (
        TrainResult.model_validate_json((each / "result.json").read_text()) for each in (own, tmp_path / "run")
    )
    assert found.framework_version.endswith("with DeepSpeed 0.19.8")
    assert [found.train_loss, found.val_loss] == pytest.approx([wanted.train_loss, wanted.val_loss], rel=1e-5)
    whole, held = 4 * wanted.parameters, found.state_bytes
    assert held is not None
    shares = {"parameters": sharding == "parameters", "gradients": True, "optimizer": True}
    for part, slots in (("parameters", 1), ("gradients", 1), ("optimizer", 3)):  # a copy of the weights, two moments
        share = 0.5 if shares[part] else 1.0
        assert slots * share * whole <= held[part] <= slots * share * whole + 1000, part
    mine, theirs = (load_file(next(each.glob("checkpoints/step-*/*.safetensors"))) for each in (own, tmp_path / "run"))
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        assert np.linalg.norm(theirs[name] - value) <= 1e-3 * max(1.0, float(np.linalg.norm(value))), name
