"""One rank of `hvdkit evaluate`: evaluate a checkpoint on the validation split."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

import hvdkit
from hvdkit.checkpoint import snapshots
from hvdkit.checkpoint.resume import check_classes
from hvdkit.core import metrics
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Session
from hvdkit.core.state import digest
from hvdkit.data import fingerprint
from hvdkit.data.counts import check_validation
from hvdkit.data.dataset import BatchedSplit
from hvdkit.errors import RunError
from hvdkit.files import write_atomic
from hvdkit.heartbeat import Heartbeat
from hvdkit.recipe.schema import Recipe
from hvdkit.results.evaluate import EvaluationResult
from hvdkit.worker import alike
from hvdkit.worker.setup import Script, Setup, start


def evaluate(
    adapter: Adapter,
    script: Script,
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
    check_validation(len(setup.dataset.val))
    session = setup.session(recipe)
    found = snapshots.read(folder)
    check_classes(found.record, setup.dataset)
    state, averaged = found.model(average)
    session.load_state(state)
    if setup.mesh.world.size > 1:
        _check_alike(setup, session)
    on_batch = partial(heartbeat.beat, "evaluation")
    split, group = setup.dataset.val, setup.mesh.data
    sums, total = metrics.summed(adapter, session, setup.task.metrics, split, recipe.batch_size, group, on_batch)
    if not all(math.isfinite(value) for value, _ in sums.values()):  # JSON cannot represent it
        raise RunError(f"{folder}: its loss is no number: training has run away before; use an earlier checkpoint")
    versions, means = adapter.versions(), setup.task.metrics.means(sums, total)
    result = EvaluationResult(
        framework=adapter.NAME,
        framework_version=versions["framework"],
        hvdkit_version=hvdkit.__version__,
        recipe=recipe.name,
        model=recipe.model.name,
        np=setup.mesh.world.size,
        trained_by=found.record.framework,
        step=found.record.progress.step,
        averaged=averaged,
        correct=round(sums["accuracy"][0]) if sums.get("accuracy", (0, 0))[1] == total else None,
        total=total,
        accuracy=means.get("accuracy"),
        loss=means.get("loss"),
        metrics=means,
    )
    if setup.mesh.is_root and out:
        write_atomic(out / "evaluate.json", result.model_dump_json(indent=2) + "\n")
    adapter.shutdown()


def _check_alike(setup: Setup, session: Session) -> None:
    """Check that all ranks evaluate the same model on the same samples; collective. Raises RequestError."""
    dataset = setup.dataset
    setup = replace(setup, dataset=replace(dataset, fingerprints=fingerprint.of_dataset(dataset)))
    outputs = []
    if setup.task.own and not isinstance(dataset.val, BatchedSplit):
        batch = dataset.val.batch(np.arange(setup.recipe.batch_size) % len(dataset.val))
        outputs = [session.predict(batch.inputs)]
    alike.check(setup, session, digest(session.model_arrays()), outputs)
