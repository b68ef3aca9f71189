"""`hvdkit parity`: four frameworks compute the same, and each planted fault is found and named."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hvdkit.commands import parity, parity_verdict
from hvdkit.errors import RequestError
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema
from hvdkit.results.parity import Parity
from tests.conftest import FRAMEWORKS, ROOT, Hvdkit
from tests.launching import framework_job

pytestmark = pytest.mark.long


# fault -> (what is missed, the tensor that deviates first, a word of the part of the step)
TOLD = {
    "bn_epsilon": ("logits_f64", "layer1.0.bn1.running_mean", "forward"),
    "bn_momentum": ("buffers_f64", "bn1.running_mean", "running statistics"),
    "decay_on_biases": ("weights_f64", "bn1.weight", "update"),
    "asymmetric_padding": ("logits_f64", "layer2.0.bn1.running_mean", "forward"),
    "average_of_averages": ("evaluation_f64", "evaluation", "average"),
    "rate_inside_momentum": ("step_f64", "optimizer.momentum", "keeps"),
    "label_smoothing": ("gradients_f64", "loss", "loss"),
}
PLANTED = [("pytorch", fault) for fault in TOLD] + [
    ("tensorflow", "asymmetric_padding"),
    ("keras", "bn_momentum"),
    ("mxnet", "bn_epsilon"),
]


@pytest.mark.check
def test_a_gradient_that_float32_does_not_resolve_is_left_out_of_float32() -> None:
    """The gradient of a bias before a batch norm is rounding: 3.3 times the reference's error says nothing."""
    reference = [{"conv.weight": 3e-7, "conv.bias": 0.07}, {"conv.weight": 2e-2, "conv.bias": 0.03}]
    own = [{"conv.weight": 4e-7, "conv.bias": 0.24}, {"conv.weight": 3e-2, "conv.bias": 0.02}]
    assert parity_verdict.compared(own, reference) == ({"conv.weight": 4e-7}, {"conv.weight": 3e-7})
    alone = [{"conv.bias": batch["conv.bias"]} for batch in reference]
    assert parity_verdict.compared(alone, alone) == (alone[0], alone[0]), "else nothing would be compared"


@pytest.mark.usefixtures("warm")
def test_four_frameworks_compute_the_same(hvdkit: Hvdkit, recipe: Path, tmp_path: Path) -> None:
    settings = ("model.name=resnet8", "batch_size=8", "loss.label_smoothing=0.1", "optimizer.decay=weights")
    done = hvdkit("parity", recipe, "--steps", 3, "--out", "run", *settings, "optimizer.nesterov=true", timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = Parity.model_validate_json((tmp_path / "run" / "parity.json").read_text())
    assert result.passed and result.reference == "pytorch" and (result.np, result.steps) == (2, 3)
    assert list(result.frameworks) == list(FRAMEWORKS)
    for name, each in result.frameworks.items():
        assert each.passed and each.missed == [], name
        assert each.batches_equal and each.initial_weights_equal
        for key, limit in result.marks.items():
            assert getattr(each, key) <= limit, (name, key)
            # a framework of its own cannot agree with PyTorch in every bit
            assert name == "pytorch" or key == "applied_f64" or getattr(each, key) > 0, (name, key)
        largest = each.f32_factor * each.reference_gradients_f32
        assert each.reference_gradients_f32 > 1e-7 and each.gradients_f32 <= largest
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.yaml", "logs", "parity.csv", "parity.json", "parity.md", "parity.png",
    }  # fmt: skip
    assert (tmp_path / "run" / "parity.png").read_bytes().startswith(b"\x89PNG")
    assert "passed" in (tmp_path / "run" / "parity.md").read_text()


@pytest.fixture(scope="module")
def planted(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Findings by framework and fault: the reference's ranks leave the trace, each framework's follow with faults."""
    folder = tmp_path_factory.mktemp("planted")
    overrides = [
        "model.name=resnet8",
        "batch_size=8",
        "loss.label_smoothing=0.1",
        "optimizer.decay=weights",
        "optimizer.weight_decay=0.01",
    ]
    checked = schema.load(recipe, overrides)
    (folder / "recipe.yaml").write_text(schema.dump(checked))
    (folder / "trace").mkdir()

    @cache
    def ran(framework: str) -> None:
        if framework != "pytorch":
            ran("pytorch")
        arguments = [str(ROOT / "tests" / "parity" / "rank.py"), framework, str(folder / "recipe.yaml")]
        arguments += [str(folder / "trace"), *(["--leads"] if framework == "pytorch" else [])]
        LAUNCHERS["direct"].run(framework_job(framework, folder / "logs" / framework, *arguments))

    def verdict(framework: str, fault: str) -> Parity:
        ran(framework)
        findings = json.loads((folder / "trace" / f"{framework}-{fault}.json").read_text())
        return parity.judge(parity.plan(checked, [framework], 2, Placement(2)), {framework: findings})

    return SimpleNamespace(recipe=checked, verdict=verdict)


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("framework", "fault"), PLANTED)
def test_a_planted_fault_is_found_and_named(framework: str, fault: str, planted: Any) -> None:
    each = planted.verdict(framework, fault).frameworks[framework]
    missed, tensor, word = TOLD[fault]
    assert not each.passed and missed in each.missed
    assert each.first_deviation.startswith(tensor), each.first_deviation
    assert word in each.likely_cause


@pytest.mark.usefixtures("warm")
def test_a_missed_limit_is_named_in_table_and_page(planted: Any) -> None:
    from hvdkit.report.parity import deviations, parity_markdown

    bad = planted.verdict("pytorch", "label_smoothing")
    assert not bad.passed
    (line,) = deviations(bad)
    assert line.startswith("pytorch: missed ") and "deviates first in loss: " in line
    text = parity_markdown(bad)
    assert "NOT PASSED" in text and f"**{bad.frameworks['pytorch'].gradients_f64:.1e}**" in text and line in text


@pytest.mark.usefixtures("warm")
def test_a_proof_that_does_not_hold_is_no_proof(planted: Any, tmp_path: Path) -> None:
    proof, recipe = planted.verdict("pytorch", "label_smoothing"), planted.recipe
    parity.check(proof, tmp_path, recipe, ["pytorch"])
    each = proof.frameworks["pytorch"]
    forged = proof.model_copy(
        update={"passed": True, "frameworks": {"pytorch": each.model_copy(update={"passed": True, "missed": []})}}
    )
    other = recipe.model_copy(update={"loss": recipe.loss.model_copy(update={"label_smoothing": 0.3})})
    for bad, of, frameworks, told in (
        (forged, recipe, ["pytorch"], "does not match its errors"),
        (proof.model_copy(update={"marks": {}}), recipe, ["pytorch"], "does not match its errors"),
        (proof, other, ["pytorch"], "loss.label_smoothing: it has 0.1, the recipe 0.3"),
        (proof, recipe, ["pytorch", "mxnet"], "got no mxnet"),
    ):
        with pytest.raises(RequestError, match=told):
            parity.check(bad, tmp_path, of, frameworks)
