"""GPT on text: four frameworks compute the same, planted faults are found, and commands work on its runs."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from hvdkit.commands import parity
from hvdkit.data.text import open_text
from hvdkit.data.tokens import open_tokens
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema
from hvdkit.recipe.data import Text
from hvdkit.results.parity import Parity
from hvdkit.results.profile import load
from hvdkit.tasks import gpt
from hvdkit.tasks.task import parameter_count
from tests.conftest import FRAMEWORKS, ROOT, Hvdkit
from tests.conftest import run as run_command
from tests.launching import framework_job

pytestmark = pytest.mark.long


RECIPE = ROOT / "recipes" / "gpt-tiny.yaml"
SMALL = (
    "model.layers=1",
    "model.heads=2",
    "model.width=16",
    "model.context=16",
    "data.validation=0.01",
    "schedule.warmup_epochs=0",
)
# fault -> (what is missed, what deviates first, a word of the likely cause)
FOUND = {
    "post_norm": ("logits_f64", "logits"),
    "exact_gelu": ("logits_f64", "logits"),
    "untied_head": ("gradients_f64", "gradient of transformer.wte.weight"),
    "mask_off_by_one": ("logits_f64", "logits"),
    "position_off_by_one": ("logits_f64", "logits"),
    "decay_on_norms": ("weights_f64", "transformer.h.0.ln_1.weight"),
    "no_scale": ("logits_f64", "logits"),
}


@pytest.mark.check
@pytest.mark.parametrize(
    ("name", "parameters"),
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("gpt2-large", 774_030_080), ("gpt2-xl", 1_557_611_200)],
)
def test_published_sizes(name: Any, parameters: int) -> None:
    table = gpt.architecture(schema.GptModel(name=name))
    assert parameter_count(table) == parameters
    assert table.training_flop() == 6 * parameters + 12 * table.layers * table.width * 1024


@pytest.mark.check
@pytest.mark.parametrize(("keys", "deviation"), [({}, 0.02), ({"initializer_range": 0.08}, 0.08)])
def test_initial_weights_have_the_stated_deviations(keys: dict[str, float], deviation: float) -> None:
    table = gpt.architecture(schema.GptModel(name="gpt", layers=8, heads=2, width=64, context=32, **keys))
    state = table.initial_state(1)
    assert {name: array.shape for name, array in state.items()} == table.parameter_shapes()
    assert state["transformer.h.3.mlp.c_fc.weight"].std() == pytest.approx(deviation, rel=0.03)
    assert state["transformer.h.3.mlp.c_proj.weight"].std() == pytest.approx(deviation / 4, rel=0.03)
    assert table.transformers_config()["initializer_range"] == deviation
    assert not state["transformer.h.3.attn.c_attn.bias"].any() and (state["transformer.ln_f.weight"] == 1).all()


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(300)
def test_four_frameworks_compute_the_same(hvdkit: Hvdkit, tmp_path: Path) -> None:
    done = hvdkit("parity", RECIPE, "--steps", 3, "--out", "run", *SMALL, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = Parity.model_validate_json((tmp_path / "run" / "parity.json").read_text())
    assert result.passed and list(result.frameworks) == list(FRAMEWORKS)
    assert "buffers_f64" not in result.checks and "running statistics" not in done.stdout  # a GPT has none
    for name, each in result.frameworks.items():
        assert each.logits_f64 < 1e-14 and each.gradients_f64 < 1e-13, name
        assert name == "pytorch" or each.logits_f64 > 0, name
        assert each.f32_factor == 3, name
        assert each.logits_f32 < 1e-5 and each.gradients_f32 < 1e-4, name  # PyTorch's float32 has products of its own


@pytest.fixture(scope="module")
def planted(warm_runtimes: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The findings of a sound reference about each planted fault: two ranks of PyTorch, once for all of them."""
    folder = tmp_path_factory.mktemp("planted")
    checked = schema.load(RECIPE, SMALL)
    (folder / "recipe.yaml").write_text(schema.dump(checked))
    (folder / "trace").mkdir()
    script = ROOT / "tests" / "parity" / "rank.py"
    asked = (script, "pytorch", folder / "recipe.yaml", folder / "trace", "--leads")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HVDKIT_RUNTIMES", str(warm_runtimes))
        LAUNCHERS["direct"].run(framework_job("pytorch", folder / "logs", *asked))

    def verdict(fault: str) -> Parity:
        findings = json.loads((folder / "trace" / f"pytorch-{fault}.json").read_text())
        return parity.judge(parity.plan(checked, ["pytorch"], 2, Placement(2)), {"pytorch": findings})

    return verdict


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FOUND)
def test_a_planted_fault_is_found_and_named(fault: str, planted: Any) -> None:
    each = planted(fault).frameworks["pytorch"]
    missed, first = FOUND[fault]
    assert not each.passed and missed in each.missed
    assert each.first_deviation == first


@pytest.fixture(scope="module")
def trained(warm_runtimes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks under PyTorch; to be read only."""
    folder = tmp_path_factory.mktemp("trained")
    command = [sys.executable, "-m", "hvdkit", "train", str(RECIPE), "--framework", "pytorch", "-np", "2"]
    environment = {**os.environ, "HVDKIT_RUNTIMES": str(warm_runtimes)}
    done = run_command([*command, "--out", "run", *SMALL, "steps=30"], 120, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "run"


def test_a_run_states_tokens(trained: Path) -> None:
    result = json.loads((trained / "result.json").read_text())
    assert result["unit"] == "tokens" and result["parameters"] == 256 * 16 + 16 * 16 + 12 * 16 * 16 + 13 * 16 + 2 * 16
    found = result["validation"]
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["bits_per_byte"] == pytest.approx(found["loss"] / math.log(2))
    assert found["bits_per_byte"] < 7  # 8 before training
    assert result["task"] == "language_modeling" and result["text_sha256"] == open_tokens(Text(name="text")).digest
    assert result["tokens_per_second"] == result["images_per_second"] == 16 * result["samples_per_second"]
    assert "images" not in result["tuning"]
    tokens = 30 * 2 * 4 * 16  # steps, ranks, windows, context
    assert result["images_per_second"] == pytest.approx(
        tokens * result["measured_steps"] / 30 / (sum(result["step_ms"]) / 1e3), rel=0.01
    )


def test_an_export_is_what_transformers_reads(trained: Path, inside: Hvdkit, tmp_path: Path) -> None:
    done = inside("export", trained, "--out", "model.safetensors")
    assert done.returncode == 0 and "GPT2LMHeadModel.from_pretrained('.')" in done.stdout, done.stderr
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["n_layer"], config["n_head"], config["n_embd"], config["n_positions"]) == (1, 2, 16, 16)
    assert (config["vocab_size"], config["model_type"], config["activation_function"]) == (256, "gpt2", "gelu_new")
    assert (
        load_file(tmp_path / "model.safetensors").keys() == gpt.GPT("gpt", 1, 2, 16, 16, 256).parameter_shapes().keys()
    )
    for name in ("model.onnx", "other.safetensors", "m.gguf"):
        done = inside("export", trained, "--out", name)
        assert done.returncode == 2 and "expected a file named model.safetensors" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").unlink()
    done = inside("export", trained, "--out", "model.safetensors")
    assert done.returncode == 2 and "config.json exists; add --overwrite" in done.stderr


@pytest.mark.usefixtures("warm")
def test_a_profile_has_each_gradient_and_counts_tokens(hvdkit: Hvdkit, tmp_path: Path) -> None:
    # Keras's layer norms reshape their gradients, which TensorFlow's optimizer merges.
    done = hvdkit("profile", RECIPE, "--framework", "keras", "-np", 1, "--steps", 8, "--out", "run", *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    profile = load(tmp_path / "run" / "profile.json")
    assert {tensor.name for tensor in profile.tensors} == gpt.GPT("gpt", 1, 2, 16, 16, 256).parameter_shapes().keys()
    assert (profile.unit, profile.units_per_sample) == ("tokens", 16) and "transformer.h.0 " in done.stdout
    opened, _ = open_text(Text(name="text", validation=0.01), 16, 256, 1)
    assert profile.train_samples == len(opened.train)


@pytest.mark.thorough
@pytest.mark.usefixtures("warm")
def test_four_frameworks_go_on_with_the_same_text(trained: Path, hvdkit: Hvdkit) -> None:
    texts = set()
    for framework in FRAMEWORKS:
        words = ("--framework", framework, "--prompt", "The statement ", "--new-tokens", 20)
        done = hvdkit("generate", trained, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        texts.add(done.stdout)
    (text,) = texts
    assert text.startswith("The statement ") and len(text.rstrip("\n").encode()) >= 14 + 20
    done = hvdkit("generate", trained, "--prompt", "The following statement ")
    assert done.returncode == 2 and "--prompt: expected at most 16 tokens" in done.stderr
