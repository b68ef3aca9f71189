"""`hvdkit parity` of a model that ranks divide: it computes what whole ones do, and each planted fault is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from hvdkit.adapters.capabilities import CAPABILITIES
from hvdkit.commands import parity
from hvdkit.launch.launchers import LAUNCHERS
from hvdkit.launch.placement import Placement
from hvdkit.recipe import schema
from hvdkit.results.parity import Parity
from tests.conftest import ROOT, Hvdkit
from tests.divided import LARGEST_ERROR, SMALL
from tests.launching import framework_job

OTHERS = ("keras",)
ALWAYS = ("optimizer.clip_norm=0.1", "schedule.warmup_epochs=0", "threads=1")
USUAL = (*SMALL, *ALWAYS, "data.validation=0.01")
MODELS = {
    "gpt": (ROOT / "recipes" / "gpt-tiny.yaml", USUAL),
    "resnet": (ROOT / "recipes" / "resnet20-digits.yaml", (*ALWAYS, "model.name=resnet8", "batch_size=8")),
}
STAGES = ("parallel.pipeline=2", "parallel.microbatches=2")
PARTS = ("parallel.tensor=2",)
# model and fault -> (the division, what is missed, what deviates first, a word of the part of the step)
PLANTED = {
    ("gpt", "tied_weights_not_summed"): (STAGES, "gradients_f64", "gradient of transformer.wte.weight", "backward"),
    ("gpt", "microbatch_dropped"): (STAGES, "gradients_f64", "gradient of transformer.ln_f.bias", "backward"),
    ("gpt", "activation_scaled"): (STAGES, "gradients_f64", "loss", "loss"),
    ("gpt", "norm_of_a_stage"): (STAGES, "weights_f64", "transformer.", "update"),
    ("gpt", "divided_by_ranks"): (STAGES, "gradients_f64", "gradient of transformer.ln_f.bias", "backward"),
    ("gpt", "stale_weights"): (STAGES, "gradients_f64", "loss", "loss"),
    ("gpt", "no_sum_after_rows"): (PARTS, "logits_f64", "cross-entropies", "forward"),
    ("gpt", "sum_too_many"): (PARTS, "gradients_f64", "gradient of transformer.h.1.mlp.c_proj.weight", "backward"),
    ("gpt", "vocabulary_off_by_one"): (PARTS, "logits_f64", "cross-entropies", "forward"),
    ("gpt", "norm_of_a_part"): (PARTS, "weights_f64", "transformer.", "update"),
    ("resnet", "microbatch_dropped"): (STAGES, "gradients_f64", "gradient of", "backward"),
    ("resnet", "activation_scaled"): (STAGES, "gradients_f64", "layer3.0.bn1.running_mean", "running statistics"),
    ("resnet", "no_sum_after_rows"): (PARTS, "logits_f64", "layer2.0.bn2.running_mean", "forward"),
    ("resnet", "norm_of_a_part"): (PARTS, "weights_f64", "", "update"),
}


def proved(
    hvdkit: Hvdkit, tmp_path: Path, np: int, *words: str, framework: str = "pytorch", model: str = "gpt"
) -> Parity:
    """The result of a short check that has passed."""
    recipe, usual = MODELS[model]
    options = ("-np", np, "--steps", 3, "--framework", framework, "--out", "run")
    done = hvdkit("parity", recipe, *options, *usual, *words, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = Parity.model_validate_json((tmp_path / "run" / "parity.json").read_text())
    assert result.np == np and result.divided and "each copy of the model on one rank" in done.stdout
    for name, each in result.frameworks.items():
        errors = (each.logits_f64, each.gradients_f64, each.weights_f64, each.step_f64, each.evaluation_f64)
        assert each.passed and max(errors) <= LARGEST_ERROR, (name, errors)
        assert each.worst_gradient and each.evaluation_total > 0
    return result


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("schedule", (pytest.param("gpipe", marks=pytest.mark.thorough), "1f1b"))
def test_stages_and_those_of_pytorch_compute_what_one_process_does(
    schedule: str, hvdkit: Hvdkit, tmp_path: Path
) -> None:
    result = proved(hvdkit, tmp_path, 2, "--rival", "pipelining", *STAGES, f"parallel.schedule={schedule}")
    assert list(result.frameworks) == ["pytorch", "pytorch-pipelining"]


@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(300)
def test_parts_and_those_of_dtensor_compute_what_one_process_does(hvdkit: Hvdkit, tmp_path: Path) -> None:
    result = proved(hvdkit, tmp_path, 2, "--rival", "fsdp-tp", *PARTS)
    assert list(result.frameworks) == ["pytorch", "pytorch-fsdp-tp"]


@pytest.mark.thorough
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words", [("--rival", "pipelining", *STAGES), ("--rival", "fsdp-tp", *PARTS), (*STAGES, *PARTS)]
)
def test_four_ranks_compute_what_fewer_do(words: tuple[str, ...], hvdkit: Hvdkit, tmp_path: Path) -> None:
    """Two copies of the model in two stages, or in two parts; and one in two stages of two parts."""
    proved(hvdkit, tmp_path, 4, *words)


@pytest.mark.thorough
@pytest.mark.usefixtures("warm")
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("model", "words"), [("gpt", STAGES), ("gpt", PARTS), ("resnet", STAGES)])
@pytest.mark.parametrize("framework", OTHERS)
def test_other_frameworks_compute_what_pytorch_does_alone(
    framework: str, model: str, words: tuple[str, ...], hvdkit: Hvdkit, tmp_path: Path
) -> None:
    assert list(proved(hvdkit, tmp_path, 2, *words, framework=framework, model=model).frameworks) == [framework]


@pytest.fixture(scope="module")
def planted(warm_runtimes: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str, str], Parity]:
    """The verdict on each fault: one rank leaves the trace, two follow with all faults of a division."""

    @cache
    def followed(framework: str, model: str, division: tuple[str, ...]) -> tuple[Path, schema.Recipe]:
        folder = tmp_path_factory.mktemp("planted")
        recipe, usual = MODELS[model]
        checked = schema.load(recipe, [*usual, *division])
        (folder / "recipe.yaml").write_text(schema.dump(checked))
        (folder / "trace").mkdir()
        asked = (ROOT / "tests" / "parity" / "rank.py", framework, folder / "recipe.yaml", folder / "trace")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HVDKIT_RUNTIMES", str(warm_runtimes))
            for np, more in ((1, ("--leads",)), (2, ())):
                job = framework_job(framework, folder / f"logs-{np}", *asked, *more, np=np)
                LAUNCHERS["direct"].run(job)
        return folder / "trace", checked

    def verdict(framework: str, model: str, fault: str) -> Parity:
        trace, checked = followed(framework, model, PLANTED[model, fault][0])
        findings = json.loads((trace / f"{framework}-{fault}.json").read_text())
        return parity.judge(parity.plan(checked, [framework], 2, Placement(2)), {framework: findings})

    return verdict


def faults() -> Iterator[Any]:
    """Frameworks, models that they divide, and faults."""
    for framework, ((model, fault), (division, *_)) in product(("pytorch", *OTHERS), PLANTED.items()):
        needed = ("pipeline" if division is STAGES else "tensor") + ("-resnet" if model == "resnet" else "")
        if needed in CAPABILITIES[framework]:
            yield pytest.param(framework, model, fault, marks=pytest.mark.thorough if framework in OTHERS else ())


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("framework", "model", "fault"), [*faults()])
def test_a_planted_fault_is_found_and_named(
    framework: str, model: str, fault: str, planted: Callable[[str, str, str], Parity]
) -> None:
    judged = planted(framework, model, fault).frameworks[framework]
    _, missed, first, word = PLANTED[model, fault]
    assert not judged.passed and missed in judged.missed, judged.missed
    assert judged.first_deviation and judged.first_deviation.startswith(first), judged.first_deviation
    assert judged.likely_cause and word in judged.likely_cause
