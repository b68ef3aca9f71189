"""`hvdkit plan`: ten situations as practitioners' guides judge them, and what holds of every plan."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hvdkit
from hvdkit.commands import checked_run
from hvdkit.errors import RequestError
from hvdkit.launch.diagnosis import blame
from hvdkit.launch.diagnosis.exits import FailureRecord, RankEnd
from hvdkit.profiling import published
from hvdkit.recipe import registry, schema
from hvdkit.results.ladder import Ladder
from hvdkit.results.profile import save
from hvdkit.runtimes.pins import FRAMEWORKS
from hvdkit.simulator import ladder as ladders
from tests.conftest import Hvdkit

pytestmark = pytest.mark.check

P3, A100 = "aws-p3-16xlarge", "a100-nvlink-ib"  # 8 GPUs of 16 and of 80 GB a host
MANY = {"data.train_images": 1_000_000}
LARGE = {"batch_size": 1, "data.train_images": 1_000_000}


def gpt(layers: int, width: int, heads: int = 64, context: int = 2048) -> dict[str, Any]:
    sizes = {"layers": layers, "width": width, "heads": heads, "context": context}
    return {"batch_size": 1, "model": {"name": "gpt", "vocabulary": 50257} | sizes}


def plan(recipe: str, ranks: int, overrides: dict[str, Any] | list[str], cluster: str = P3, **options: Any) -> Ladder:
    ladder = hvdkit.plan(recipe, overrides, cluster=cluster, ranks=ranks, **options)
    assert isinstance(ladder, Ladder)
    return ladder


SITUATIONS: dict[str, tuple[str, int, Any, dict[str, Any], str | None]] = {
    # SageMaker, "Choosing a strategy": data parallelism where the model fits; Hugging Face, "Parallelism methods",
    # "your model fits onto a single GPU": DistributedDataParallel.
    "fits": ("resnet50-synthetic", 8, MANY | {"batch_size": 32}, {}, "as it is"),
    "fits on many hosts": ("resnet50-synthetic", 64, MANY | {"batch_size": 32}, {}, "as it is"),
    # SageMaker, the same page: out of memory, "reduce the batch size".
    "batch too large": ("resnet50-synthetic", 8, MANY | {"batch_size": 512}, {}, "smaller batch"),
    # Hugging Face, "GPU" (training on one): at the smallest batch, gradient checkpointing.
    "one sample too large": (
        "resnet50-synthetic", 8, LARGE | {"data.height": 3136, "data.width": 3136}, {}, "recompute",
    ),
    # SageMaker, the same page, "try gradient compression": mixed precision. On V100s that is fp16.
    "still too large": (
        "resnet50-synthetic", 8, LARGE | {"data.height": 4480, "data.width": 4480}, {}, "precision",
    ),
    # DeepSpeed, "Getting started with ZeRO", and Rajbhandari et al. 2020: what AdamW keeps of 1.5 billion parameters is
    # more than a GPU of 16 GB has.
    "state too large": ("gpt2", 8, {"model.name": "gpt2-xl", "batch_size": 1}, {}, "sharding: gradients"),
    # The same on one GPU, where there is nobody to share with.
    "one GPU": ("gpt2", 1, {"model.name": "gpt2-xl", "batch_size": 1}, {}, None),
    # Goyal et al. 2017, section 2: ranks divide a global batch, which cannot be larger than an epoch.
    "few samples": ("resnet50-synthetic", 64, {"data.train_images": 100}, {}, "as it is"),
    # Rajbhandari et al. 2020, section 5: all state sharded, where the parameters alone are too large.
    "parameters too large": ("gpt2", 64, gpt(48, 8192), {"cluster": A100}, "sharding: parameters"),
    # Hugging Face, "Parallelism methods", "largest layer does not fit": tensor parallelism, in a host. Here it is the
    # activations of a sample, of which tensor parallelism divides most (Korthikanti et al. 2022, section 4.2.1).
    "a sample too long": ("gpt2", 8, gpt(16, 4096, 32, 98_304), {"cluster": A100}, "tensor"),
    # Narayanan et al. 2021, takeaway 1: tensor parallelism up to a host's GPUs, pipelines across hosts.
    "beyond a host": ("gpt2", 64, gpt(24, 16_384), {"cluster": A100}, "tensor and pipeline"),
    # Hugging Face, the same page, slow network between hosts of one device: a pipeline.
    "slow hosts": (
        "gpt-tiny", 2, {"model.width": 1024, "model.layers": 16, "batch_size": 1, "accumulate": 4},
        {"cluster": "starved-100mbit", "device": "3GiB", "framework": "mxnet"}, "pipeline",
    ),
}  # fmt: skip


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_plan_is_what_guides_say(situation: str) -> None:
    recipe, ranks, overrides, options, expected = SITUATIONS[situation]
    ladder = plan(recipe, ranks, overrides, **options)
    assert (ladder.chosen.name if ladder.chosen else None) == expected
    texts = [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    given = schema.load(registry.locate(Path(recipe)), texts)
    for rung in ladder.rungs:
        assert rung.why and rung.chosen == rung.why.startswith("chosen")
        if rung.parts is None:
            continue
        assert rung.fits == (rung.parts.total <= (ladder.room_bytes or 0))
        assert rung.batch_size * rung.accumulate * rung.data_ranks == ladder.samples_per_update
        changed = schema.revise(given.model_dump(), "", [f"{key}={json.dumps(v)}" for key, v in rung.changes.items()])
        assert changed.batch_size == rung.batch_size and changed.data_ranks(ladder.ranks) == rung.data_ranks


def test_what_is_divided_is_no_more_than_memory_needs() -> None:
    """Narayanan et al. 2021, takeaway 2: the smallest product of stages and parts that fits, the rest data parallel."""
    ladder = plan("gpt2", 64, gpt(24, 16_384), cluster=A100)
    assert ladder.chosen and ladder.chosen.data_ranks == 4
    assert (ladder.chosen.changes["parallel.tensor"], ladder.chosen.changes["parallel.pipeline"]) == (8, 2)
    assert "pytorch does not train stages of a GPT on a gpu yet" in ladder.chosen.why


def test_few_samples_take_fewer_ranks_and_a_framework_that_cannot_names_one_that_can() -> None:
    few = plan("resnet50-synthetic", 64, {"data.train_images": 100})
    assert (few.asked_ranks, few.ranks) == (64, 6) and "6 ranks in place of 64" in few.notes[0]
    assert plan("resnet50-synthetic", 64, {}, samples=100).ranks == 6
    keras = plan("gpt2", 64, gpt(48, 8192), cluster=A100, framework="keras")
    assert keras.chosen and not keras.chosen.supported and keras.chosen.why.endswith("; pytorch can")


def test_predicted_updates(tmp_path: Path) -> None:
    """As it is, an update takes what `hvdkit predict` says; what computes more takes longer, and what is faster for
    sure is chosen."""
    file, batch = tmp_path / "profile.json", MANY | {"batch_size": 64}
    save(published.profile("resnet50", 390.0, 64, "V100"), file)
    ladder = plan("resnet50-synthetic", 64, batch, profile=file)
    rungs = {rung.name: rung for rung in ladder.rungs}
    predicted = hvdkit.predict(file, cluster=P3, ranks=64, out=tmp_path / "p").points[0]
    step = rungs["as it is"]
    assert step.step_ms == pytest.approx(predicted.step_ms, rel=0.01)
    assert step.low_ms == pytest.approx(predicted.low_ms, rel=0.01)
    assert step.samples_per_second == pytest.approx(predicted.images_per_second, rel=0.01)
    forward = 64 / 390.0 * 1e3 / 3
    assert (rungs["recompute"].step_ms or 0) - (step.step_ms or 0) == pytest.approx(forward, rel=0.15)
    half = rungs["precision"]
    assert half.step_ms and half.low_ms and half.high_ms and half.step_ms < 0.7 * (step.step_ms or 0)
    assert half.high_ms / half.low_ms > 1.5 * (step.high_ms or 0) / (step.low_ms or 1), "it was not measured"
    stages = rungs["pipeline"]
    assert stages.low_ms and stages.step_ms and stages.high_ms and stages.low_ms < stages.step_ms < stages.high_ms
    four = plan("resnet50-synthetic", 64, batch | {"accumulate": 4}, profile=file).rungs[0].step_ms or 0
    assert (step.step_ms or 0) + 3 * 64 / 390.0 * 1e3 == pytest.approx(four, rel=0.05)
    faster = plan("resnet50-synthetic", 8, batch, profile=file, speed=2.0)
    assert (faster.rungs[0].step_ms or 0) < 0.6 * (step.step_ms or 0)
    with pytest.raises(RequestError, match="expected one of gpt2 with"):
        plan("gpt2", 8, {}, profile=file)


def test_faster_for_sure_is_chosen_before_the_order() -> None:
    recipe = schema.load(registry.locate(Path("gpt2")), ["model.name=gpt2-xl", "batch_size=1"])
    situation = ladders.Situation(recipe, 8, 8, "pytorch", True, round(14.2 * 2**30), "V100")
    slow, fast = ladders.PredictedStep(900, 850, 950), ladders.PredictedStep(700, 650, 750)
    for other, expected in (
        (fast, "sharding: parameters"),
        (ladders.PredictedStep(890, 840, 940), "sharding: gradients"),
    ):
        rungs = ladders.climb(situation, lambda one, other=other: other if one.sharding == "parameters" else slow)
        assert [rung.name for rung in rungs if rung.chosen] == [expected]


def test_a_rank_that_lacks_memory_is_told_what_needs_less() -> None:
    recipe = schema.load(registry.locate(Path("resnet50-synthetic")), ["batch_size=128", "data.train_images=256"])
    host = SimpleNamespace(name="h")
    placement = SimpleNamespace(hosts=[host], here=True)
    run: Any = SimpleNamespace(
        recipe=recipe, np=2, rival=None, placement=placement, framework="pytorch", runtime=SimpleNamespace(gpu=False)
    )
    end = RankEnd(1, "h", exit_code=1, record=FailureRecord("error", "MemoryError: 8 GiB", 3))
    job: Any = SimpleNamespace(program=None, log=lambda rank, name: Path("rank-1.log"))
    failure: Any = blame.failure(job, blame.Verdict(end))
    line = str(checked_run._fitting(failure, run)).splitlines()[0]
    assert re.match(
        r"rank 1 on h failed at step 3: MemoryError: 8 GiB .*; use a smaller batch_size .*: a rank needs", line
    )
    assert re.search(r"less takes batch_size=64 accumulate=2 \([\d.]+ GiB\), or recompute=true \([\d.]+ GiB\)", line), (
        line
    )
    for framework in FRAMEWORKS:  # each remedy can be trained, and needs less
        situation = ladders.Situation(recipe, 2, 2, framework, False, None)
        told = ladders.remedies(situation)
        needed, less = (float(value) for value in re.findall(r"([\d.]+) GiB", told)[:2])
        assert less <= 0.9 * needed and ("recompute" in told) == (framework != "mxnet"), told
    divided = ["parallel.pipeline=2", "parallel.microbatches=2", "batch_size=256"]
    stages = schema.load(registry.locate(Path("gpt-tiny")), [*divided, "model.width=512", "model.layers=8"])
    assert "less takes" in ladders.remedies(ladders.Situation(stages, 2, 2, "pytorch", False, None)), "of stages, too"
    own = recipe.model_copy(update={"batch_size": 1, "accumulate": 1})
    assert ladders.remedies(ladders.Situation(own, 1, 1, "mxnet", False, None)).endswith("GiB"), "nothing needs less"


def test_the_command(hvdkit: Hvdkit, tmp_path: Path) -> None:
    new, out = tmp_path / "new.yaml", tmp_path / "plan"
    words = ("plan", "gpt2", "model.name=gpt2-xl", "batch_size=1", "--cluster", P3, "-n", "8")
    result = hvdkit(*words, "--new-recipe", str(new), "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert "> sharding: gradients (recompute)" in result.stdout and f"hvdkit train {new}" in result.stderr
    applied, written = schema.load(new), Ladder.read(out / "plan.json")
    assert (applied.sharding, applied.recompute, applied.batch_size) == ("gradients", True, 1)
    assert written.chosen and written.chosen.changes == {"sharding": "gradients", "recompute": True}
    assert written.records()[0]["parameters_bytes"] == 4 * written.parameters
    assert hvdkit(*words, "--new-recipe", str(new)).returncode == 2, "it is there already"
    assert hvdkit(*words[:-1], "1", "--new-recipe", str(tmp_path / "one.yaml")).returncode == 1, "nothing fits"
    wrong = hvdkit("plan", "gpt2", "--cluster", "nowhere", "-n", "3", "--device", "big", "parallel.pipeline=2")
    assert wrong.returncode == 2 and len(wrong.stderr.splitlines()) == 3, wrong.stderr
