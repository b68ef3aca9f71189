"""The recipe file: strict, typed, all faults told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdkit.errors import RequestError
from hvdkit.recipe import schema

pytestmark = pytest.mark.check

GOOD = "name: a\nmodel: {name: resnet20}\ndata: {name: digits}\noptimizer: {learning_rate: 0.1}\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def faults(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(RequestError) as caught:
        schema.load(written(tmp_path, text), overrides)
    assert caught.value.exit_status == 2
    return str(caught.value).splitlines()


def test_shipped_recipes_load_and_come_back_from_a_dump(tmp_path: Path) -> None:
    for path in sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml")):
        recipe = schema.load(path)
        assert recipe.name == path.stem and schema.load(written(tmp_path, schema.dump(recipe))) == recipe


def test_weights_are_kept_unless_null_is_said(tmp_path: Path) -> None:
    default, path = schema.Checkpointing(), written(tmp_path, GOOD)
    assert schema.load(path).checkpoint == schema.load(path, ["checkpoint={}"]).checkpoint == default
    often = schema.load(path, ["checkpoint.every_steps=50"]).checkpoint
    assert often == default.model_copy(update={"every_steps": 50})
    off = schema.load(path, ["checkpoint=null"])
    assert off.checkpoint is None and schema.load(written(tmp_path, schema.dump(off))).checkpoint is None
    (line,) = faults(tmp_path, GOOD, "checkpoint={every_epochs: 0}")
    assert "for no checkpoints give checkpoint: null" in line


def test_overrides_reach_nested_keys_and_keep_their_types(tmp_path: Path) -> None:
    nested = ["optimizer.momentum=0.5", "optimizer.nesterov=true", "schedule.decay=step", "schedule.milestones=[2]"]
    recipe = schema.load(written(tmp_path, GOOD), ["epochs=3", *nested])
    assert (recipe.epochs, recipe.optimizer.momentum, recipe.optimizer.nesterov) == (3, 0.5, True)
    assert recipe.schedule.milestones == [2]


def test_all_faults_are_told_at_once_each_with_its_key(tmp_path: Path) -> None:
    text = """
name: a
model: {name: resnet21, clases: 3}
data: {name: digts}
batch_size: "3"
epochs: true
optimizer: {learning_rate: -1e-3, momentun: 3}
threads: 0
"""
    told = faults(tmp_path, text, "sede=1", "bar", "name.x=3")
    for part in (
        "override 'bar': expected key=value",
        "override 'name.x=3': 'name' holds 'a'",
        "model.name: expected 'resnet8'",
        "model.clases: unknown key; did you mean 'classes'?",
        "got 'digts'",
        "batch_size: expected 'auto' or a whole number from 1 to 16777216, got '3'",
        "epochs: expected a whole number, got True",
        "optimizer.learning_rate: expected greater than 0, got -0.001",
        "optimizer.momentun: unknown key; did you mean 'momentum'?",
        "threads: expected 'auto' or a whole number",
        "sede: unknown key; did you mean 'seed'?",
    ):
        assert sum(part in line for line in told) == 1, (part, told)
    assert len(told) == 11


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "expected keys with values (a mapping), got nothing"),
        ("name: [a\n", "line 2, column 1: damaged YAML"),
        ("name: a\nname: b\n", "line 2, column 1: damaged YAML: key 'name' is there twice"),
        ("? [a]\n: b\n", "expected text as key"),
        ("a: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        ("a: !!bool maybe\n", "no bool: 'maybe'"),
        (f"a: {'9' * 400}\n", "a number of more than 300 digits"),
        ("model: &x [*x]\n", "damaged YAML"),
        ("a: \x07\n", "damaged YAML"),
        ("{" * 3000, "damaged YAML"),
        (GOOD + "schedule: {decay: step, milestones: [3, 2]}\n", "expected rising milestones"),
        (GOOD.replace("0.1", "0.1, momentum: 0, nesterov: true"), "optimizer: expected momentum > 0"),
        (GOOD.replace("0.1", ".nan"), "optimizer.learning_rate"),
        (GOOD.replace("name: a", "name: ../a"), "name: expected letters"),
        (GOOD.replace("data: {name: digits}", "data: {}"), "data.name is missing"),
        ("name: a\n", "model: required key is missing"),
    ],
)
def test_damaged_files(tmp_path: Path, text: str, part: str) -> None:
    told = faults(tmp_path, text)
    assert any(part in line for line in told), told
    assert all("recipe.yaml" in line for line in told)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for path, part in (
        (tmp_path / "no.yaml", "no such file"),
        (tmp_path, "cannot be read"),
        (tmp_path / "b", "no text"),
    ):
        (tmp_path / "b").write_bytes(b"name: \xff\n")
        with pytest.raises(RequestError, match=part):
            schema.load(path)


def test_keys_serve_where_they_are_read(tmp_path: Path) -> None:
    written(tmp_path, GOOD)
    for override in ("{decay: polynomial, power: 3}", "{decay: step, milestones: [1], gamma: 0.5}", "{scale: none}"):
        recipe = schema.load(tmp_path / "recipe.yaml", [f"schedule={override}"])
        (tmp_path / "resolved.yaml").write_text(schema.dump(recipe))
        assert schema.load(tmp_path / "resolved.yaml") == recipe


TOPK = "compression={method: topk, ratio: 0.01, momentum_correction: true}"


SHARDED = "sharding=gradients"
ORDERED = "order=priority"


STAGES = "parallel.pipeline=2"
INTERLEAVED = ["parallel.schedule=interleaved", "parallel.chunks=2"]
GPT = ["model={name: gpt, layers: 4, heads: 2, width: 8, context: 4}", "data={name: text}", STAGES]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["schedule.power=3"], "schedule: expected power other than 2.0 only where decay is 'polynomial', got 3.0"),
        (["schedule.milestones=[2]"], "schedule: expected milestones exactly where decay is 'step'"),
        (["schedule={scale: none, base_batch_size: 32}"], "other than 256 only where scale is 'linear', got 32"),
        (["schedule.warmup_epochs=1e308"], "schedule.warmup_epochs: expected less than or equal to 100000"),
        (["model.new_head=true"], "model: expected new_head only where weights are given"),
        (["elastic={min_np: 3, max_np: 2}"], "elastic: expected min_np at most max_np, got 3 and 2"),
        (["average_weights={}"], "average_weights: expected either decay, such as {decay: 0.999}, or from_epoch"),
        (["average_weights={from_epoch: 9}"], "average_weights.from_epoch: expected at most the recipe's 1 epochs"),
        (["loss={class_weights: [0, 0]}"], "loss: expected a class_weights above 0, got none"),
        (["loss={class_weights: [1, 2]}"], "loss.class_weights: expected 10, one for each of model.classes, got 2"),
        (["compression={method: topk, ratio: 1.5}"], "compression.ratio: expected less than or equal to 1, got 1.5"),
        (["compression={method: topk, ration: 1}"], "compression.ration: unknown key; did you mean 'ratio'?"),
        (["compression.ratio=0.1"], "required key compression.method is missing; expected one of 'none', "),
        (["compression=topq"], "compression.method: expected 'none', 'fp16', 'bf16', 'int8', 'topk', "),
        (["compression={method: topk, warmup_epochs: 9}"], "warmup_epochs: expected at most the recipe's 1 epochs"),
        ([TOPK.replace("}", ", error_feedback: false}")], "expected error_feedback true where momentum_correction"),
        ([TOPK, "optimizer.nesterov=true"], "expected optimizer sgd with plain momentum, got sgd with nesterov"),
        ([TOPK, "optimizer={name: adamw, learning_rate: 0.1}"], "sgd with plain momentum, got adamw"),
        ([TOPK, "sync.every=2"], "compression.momentum_correction: expected no sync"),
        (["sync={start: 1}"], "sync.every: required key is missing"),
        (["sync={every: 2, outer: adam}"], "sync.outer.method: expected 'nesterov', got 'adam'"),
        (["sync.every=2", "precision=fp16"], "sync: expected precision fp32, fp64 or bf16, as ranks of fp16"),
        (["sync=4"], "sync: expected keys with values (a mapping), got 4"),
        (["allreduce=central", "compression=int8"], "allreduce: expected ring, or compression none, fp16"),
        (["allreduce=central", "elastic={max_np: 2}"], "allreduce: expected ring where elastic is given, got central"),
        ([SHARDED, "compression=int8"], "compression: expected none or fp16 with sharding gradients"),
        ([SHARDED, "sync.every=2"], "sync: expected none with sharding gradients"),
        ([SHARDED, "allreduce=central"], "allreduce: expected ring with sharding gradients"),
        ([ORDERED, "optimizer.clip_norm=1"], "optimizer.clip_norm: expected null with order priority"),
        ([ORDERED, "precision=fp16"], "precision: expected fp32, fp64 or bf16 with order priority"),
        ([ORDERED, "compression=int8"], "compression: expected none or fp16 with order priority"),
        ([ORDERED, "sync.every=2"], "sync: expected none with order priority"),
        ([ORDERED, "allreduce=central"], "allreduce: expected ring with order priority"),
        (["parallel.tensor=2", "average_weights.decay=0.9"], "average_weights: expected null with a model that is"),
        ([STAGES, "batch_size=4"], "batch_size: expected 2 samples or more a microbatch, which batch norm sees, got 4"),
        ([*GPT, SHARDED], "sharding: expected none or optimizer with a model that is divided"),
        ([*GPT, "sync.every=2"], "sync: expected none with a model that is divided over ranks"),
        ([*GPT, "elastic={max_np: 2}"], "elastic: expected null with a model that is divided over ranks"),
        (
            [*GPT, "parallel.tensor=2", "loss.ignored_label=0"],
            "loss.ignored_label: expected none with a model that is divided",
        ),
        ([*GPT, "batch_size=9", "parallel.microbatches=4"], "batch_size: expected a multiple of"),
        ([*GPT, "batch_size=11"], "batch_size: expected a number of samples with a divisor from 2 to 8, of microb"),
        ([*GPT, "parallel.schedule=interleaved"], "parallel: expected chunks of 2 or more where schedule is inter"),
        ([*GPT, "parallel.chunks=2"], "where schedule is interleaved, and 1 elsewhere, got 2 and 1f1b"),
        ([*GPT, *INTERLEAVED, "parallel.microbatches=3"], "parallel: expected a multiple of pipeline, 2, of microb"),
        ([*GPT, *INTERLEAVED, "batch_size=9"], "with a divisor from 2 to 8 that is a multiple of 2, of microbatches"),
        ([*GPT, *INTERLEAVED, "parallel.split=[2, 2]"], "expected 4 numbers of blocks in split, one a stage and chu"),
        ([*GPT, "parallel.microbatches=1"], "expected at least as many microbatches as pipeline has stages, got 1 and"),
        ([*GPT, "parallel.split=[1, 2, 1]"], "parallel: expected 2 numbers of blocks in split, one a stage, got [1"),
        ([*GPT, "parallel.split=[0, 4]"], "parallel.split: expected 'auto' or how many blocks each stage has, such"),
        (["parallel.schedule=gpipe"], "parallel: expected schedule only where pipeline is above 1, got gpipe and"),
        (["parallel.data=0"], "parallel.data: expected 'auto' or a whole number from 1 to"),
        (["parallel.stages=2"], "parallel.stages: unknown key"),
        ([ORDERED, SHARDED], "sharding: expected none with order priority"),
        ([ORDERED, "recompute=true"], "recompute: expected false with order priority"),
        ([ORDERED, "average_weights={decay: 0.9}"], "average_weights: expected null with order priority"),
        ([ORDERED, "elastic={max_np: 2}"], "elastic: expected null with order priority"),
    ],
)
def test_what_cannot_be_is_told_by_its_key(overrides: list[str], told: str, tmp_path: Path) -> None:
    (line,) = faults(tmp_path, GOOD, *overrides)
    assert told in line


def test_faults_of_several_sections_are_told_together(tmp_path: Path) -> None:
    told = faults(tmp_path, GOOD, TOPK, "optimizer.nesterov=true", "sync.every=2", "precision=fp16")
    keys = [line.partition(": expected")[0].rpartition(" ")[2] for line in told]
    assert keys == [*["compression.momentum_correction"] * 2, "sync"]


def test_a_name_is_a_method_with_its_defaults(tmp_path: Path) -> None:
    for text in ("topk", "{method: topk}", "{method: topk, ratio: 0.01}", "{method: topk, ratio: 0.1}"):
        recipe = schema.load(written(tmp_path, GOOD), [f"compression={text}"])
        assert str(recipe.compression) == ("topk (ratio 0.1)" if "0.1}" in text else "topk")
        assert schema.load(written(tmp_path, schema.dump(recipe))) == recipe
