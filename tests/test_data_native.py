"""Pipelines of the user's own: what hvdkit makes of their batches and how faults are told; and the recipe's keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hvdkit.core.group import Topology
from hvdkit.data import batches as data
from hvdkit.errors import RequestError, RunError
from hvdkit.recipe import schema
from hvdkit.recipe.schema import Native

pytestmark = pytest.mark.check

PIPELINE = """
import numpy as np
from hvdkit.data.user_pipeline import NativePipeline

def open_pipeline(job):
    def train(epoch):
        for step in range(job.options.get("batches", 5)):
            value = 100 * epoch + 10 * step + job.topology.rank
            rows = job.options.get("rows", job.batch_size)
            images = np.full((rows, 4, 4, 3), value, job.options.get("dtype", "float32"))
            yield images, np.full(len(images), job.options.get("label", 1), np.int32)
    def val():
        for count in (job.batch_size, 1):
            yield np.full((count, 4, 4, 3), 7, np.float32), np.arange(count)
    return NativePipeline((4, 4, 3), train, 22, val)
"""


def opened(tmp_path: Path, text: str = PIPELINE, **options: object) -> data.Dataset:
    (tmp_path / "mine.py").write_text(text)
    kind = Native.model_validate({"name": "native", "module": str(tmp_path / "mine.py"), "options": options})
    return data.open_dataset(kind, 3, 1, Topology(rank=1, size=2, local_rank=1, local_size=2), 2)


def test_batches_come_as_the_pipeline_gives_them(tmp_path: Path) -> None:
    dataset = opened(tmp_path)
    assert dataset.native and dataset.shape == (4, 4, 3) and len(dataset.train) == 22
    batches = list(data.epoch_batches(dataset.train, 2, 1, 3, 1, 2))
    assert [batch.inputs[0, 0, 0, 0] for batch in batches] == [301, 311, 321, 331, 341]
    assert batches[0].targets.dtype == np.int64
    rest = list(data.epoch_batches(dataset.train, 2, 1, 3, 1, 2, first=12))
    assert [batch.inputs[0, 0, 0, 0] for batch in rest] == [331, 341]
    evaluated = list(data.evaluation_batches(dataset.val, 2, 1, 2))
    assert [valid for _, valid in evaluated] == [2, 1] and all(len(batch.targets) == 2 for batch, _ in evaluated)
    none = opened(tmp_path, PIPELINE.replace("train, 22, val", "train, 22"))
    assert len(none.val) == 0 and list(data.evaluation_batches(none.val, 2, 1, 2)) == []


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"batches": 4}, "expected 5 batches in epoch 0 on each rank, got 4"),
        ({"rows": 3}, "expected 2 samples a batch, got 3"),
        ({"dtype": "float64"}, r"expected samples as float32 (n, 4, 4, 3), got float64 (2, 4, 4, 3)"),
        ({"label": 3}, "expected labels from 0 to 2, got 3"),
    ],
)
def test_batches_of_another_form_end_the_run_in_a_line(options: dict[str, object], told: str, tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        list(data.epoch_batches(opened(tmp_path, **options).train, 2, 1, 0, 1, 2))
    assert str(caught.value) == f"data.module: {tmp_path / 'mine.py'}: {told}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected a function open_pipeline(job), found none"),
        ("def open_pipeline(job): return []", "expected open_pipeline to return a NativePipeline, got list"),
    ],
)
def test_files_without_a_pipeline_are_refused(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        opened(tmp_path, text)
    assert told in str(caught.value)
    with pytest.raises(RequestError, match="no such file; expected a Python file"):
        data.open_dataset(Native(name="native", module=str(tmp_path / "no.py")), 3, 1)


def loaded(tmp_path: Path, data_: str) -> schema.Recipe:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"name: a\nmodel: {{name: resnet20}}\ndata: {data_}\noptimizer: {{learning_rate: 0.1}}\n")
    return schema.load(recipe)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{name: imagefolder}", "data.path: required key is missing"),
        ("{name: imagefolder, path: a, workers: many}", "data.workers: expected 'auto' or a whole number from 0 to"),
        ("{name: imagefolder, path: a, size: 300, resize: 256}", "data: expected resize of at least size (300), got"),
        ("{name: imagefolder, path: a, augment: crop}", "data.augment: expected 'none' or 'resized-crop-flip'"),
        ("{name: imagefolder, path: [3]}", "data.path: expected a text, got ['3']"),
        ('{name: cifar10, path: "a\\0b"}', "data.path: expected a path"),
        ("{name: mnist5k, path: a}", "data.path: unknown key; it needs data.name=cifar10 or data.name=imagefolder"),
        ("{name: native, module: a.py, options: 3}", "data.options: "),
        ("{}", "expected one of 'digits', 'mnist5k', 'cifar10', 'imagefolder', 'synthetic', 'text', "),
    ],
)
def test_keys_are_checked(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        loaded(tmp_path, text)
    assert told in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
