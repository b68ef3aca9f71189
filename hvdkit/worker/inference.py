"""A rank of `hvdkit evaluate`, `generate` or `predict-images`: what a checkpoint's model says about samples."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import hvdkit
from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.resume import check_classes
from hvdkit.checkpoint.snapshots import Checkpoint
from hvdkit.core import metrics
from hvdkit.core.group import HOST
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Session
from hvdkit.core.state import digest
from hvdkit.data import fingerprint, imagefolder, pictures
from hvdkit.data.batches import evaluation_batches
from hvdkit.data.counts import check_validation
from hvdkit.data.dataset import BatchedSplit, Dataset
from hvdkit.data.text import WindowSplit
from hvdkit.errors import RunError
from hvdkit.files import read_bounded
from hvdkit.heartbeat import Heartbeat
from hvdkit.recipe.schema import Recipe
from hvdkit.results.evaluate import EvaluationResult
from hvdkit.results.generate import Generation
from hvdkit.results.predict_images import Guess, ImagePredictions, Picture
from hvdkit.tasks.gpt import GPT
from hvdkit.worker import alike
from hvdkit.worker.setup import RankScript, Setup, start


def evaluate(
    adapter: Adapter,
    script: RankScript,
    recipe: Recipe,
    folder: Path,
    out: Path | None,
    heartbeat: Heartbeat,
    average: bool = True,
) -> None:
    """Evaluate the checkpoint in `folder` on the recipe's validation split; rank 0 writes `evaluate.json` into `out`.

    With `average` it evaluates the averaged weights, where the checkpoint has any.

    Raises RequestError if the checkpoint cannot be read or does not fit the recipe, or if there are no validation
    samples; RunError if the loss is NaN or infinite.
    """
    setup = start(adapter, script, recipe)
    split, group = setup.dataset.val, setup.mesh.data
    check_validation(len(split))
    checkpoint = snapshots.read(folder)
    check_classes(checkpoint.record, setup.dataset)
    session, about = _load(setup, checkpoint, average)
    if setup.mesh.world.size > 1:
        _check_alike(setup, session)
    on_batch = partial(heartbeat.beat, "evaluation")
    sums, total = metrics.summed(adapter, session, setup.task.metrics, split, recipe.batch_size, group, on_batch)
    if not all(math.isfinite(value) for value, _ in sums.values()):  # JSON cannot represent it
        raise _no_number(folder, "its loss is no number")
    means = setup.task.metrics.means(sums, total)
    result = EvaluationResult(
        **about,
        recipe=recipe.name,
        np=setup.mesh.world.size,
        hosts=adapter.allgather_object(HOST, setup.mesh.world, name="hosts"),
        correct=round(sums["accuracy"][0]) if sums.get("accuracy", (0, 0))[1] == total else None,
        total=total,
        accuracy=means.get("accuracy"),
        loss=means.get("loss"),
        metrics=means,
    )
    if setup.mesh.is_root and out:
        result.written(out)
    adapter.shutdown()


def generate(
    adapter: Adapter, script: RankScript, recipe: Recipe, request: Path, out: Path, heartbeat: Heartbeat
) -> None:
    """Write the `count` tokens that follow `tokens`, by the model of `checkpoint`, which are the keys of the JSON file
    `request`, to `generate.json` in the folder `out`.

    Raises RequestError if the checkpoint cannot be read, RunError if the model's outputs are not finite.
    """
    wanted = json.loads(read_bounded(request))
    nothing = WindowSplit(np.empty(0, np.int64), 1)
    setup = start(adapter, script, recipe, Dataset(nothing, nothing, (), int(recipe.model.classes)))
    table = setup.architecture
    assert isinstance(table, GPT)
    session, about = _load(setup, snapshots.read(Path(wanted["checkpoint"])), wanted["average"])
    tokens: list[int] = wanted["tokens"]
    for _ in range(wanted["count"]):
        heartbeat.beat("generation")
        seen = tokens[-table.context :]
        # Always as many tokens, as some frameworks compile a model for one shape; none sees those after it.
        inputs = np.zeros((1, table.context), np.int64)
        inputs[0, : len(seen)] = seen
        logits = session.predict(inputs)[0, len(seen) - 1]
        if not np.isfinite(logits).all():
            raise _no_number(wanted["checkpoint"])
        tokens.append(int(logits.argmax()))
    result = Generation(**about, tokens=tokens[-wanted["count"] :])
    result.written(out)
    adapter.shutdown()


def predict_images(
    adapter: Adapter, script: RankScript, recipe: Recipe, request: Path, out: Path, heartbeat: Heartbeat
) -> None:
    """Write the `top` most probable classes of `files` by the model of `checkpoint`, which are the keys of the JSON
    file `request`, to `predict-images.json` in the folder `out`.

    Raises RequestError if the checkpoint or a picture cannot be read, RunError if the model's outputs are not finite.
    """
    wanted = json.loads(read_bounded(request))  # not by pydantic, which refuses names that are no UTF-8
    files: list[str] = wanted["files"]
    checkpoint = snapshots.read(Path(wanted["checkpoint"]))
    how = pictures.preprocessing(recipe.data, int(recipe.model.classes), checkpoint.record.preprocessing)
    setup = start(adapter, script, recipe, pictures.open_pictures(files, recipe.data, how))
    session, about = _load(setup, checkpoint, wanted["average"])
    answers: list[Picture] = []
    for batch, valid in evaluation_batches(setup.dataset.val, recipe.batch_size, 0, 1):
        heartbeat.beat("prediction")
        logits = session.predict(batch.inputs)[:valid].astype(np.float64)
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        if not np.isfinite(shares).all():
            raise _no_number(wanted["checkpoint"])
        for row in shares / shares.sum(axis=1, keepdims=True):
            best = np.argsort(-row, kind="stable")[: wanted["top"]].tolist()
            guesses = [Guess(name=how.class_names[k], label=k, probability=float(row[k])) for k in best]
            answers.append(Picture(file=imagefolder.printable(files[len(answers)]), classes=guesses))
    name = imagefolder.printable(wanted["checkpoint"])
    result = ImagePredictions(**about, recipe=recipe.name, checkpoint=name, pictures=answers)
    result.written(out)
    adapter.shutdown()


def _load(setup: Setup, checkpoint: Checkpoint, average: bool) -> tuple[Session, dict[str, Any]]:
    """A session with the checkpoint's weights, and what every result says about them."""
    session = setup.session(setup.recipe)
    state, averaged = checkpoint.model(average)
    session.load_state(state)
    return session, {
        "framework": setup.adapter.NAME,
        "framework_version": setup.adapter.versions()["framework"],
        "hvdkit_version": hvdkit.__version__,
        "model": setup.recipe.model.name,
        "trained_by": checkpoint.record.framework,
        "step": checkpoint.record.progress.step,
        "averaged": averaged,
    }


def _no_number(checkpoint: Path | str, what: str = "the model's outputs are no numbers") -> RunError:
    return RunError(f"{checkpoint}: {what}: training has run away before; use an earlier checkpoint")


def _check_alike(setup: Setup, session: Session) -> None:
    """Check that all ranks evaluate the same model on the same samples; collective. Raises RequestError."""
    dataset = setup.dataset
    setup = replace(setup, dataset=replace(dataset, fingerprints=fingerprint.of_dataset(dataset)))
    outputs = []
    if setup.task.own and not isinstance(dataset.val, BatchedSplit):
        batch = dataset.val.batch(np.arange(setup.recipe.batch_size) % len(dataset.val))
        outputs = [session.predict(batch.inputs)]
    alike.check(setup, session, digest(session.model_arrays()), outputs)
