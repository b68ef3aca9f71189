"""One rank of `hvdkit predict-images`: the classes of pictures, by a checkpoint's model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import hvdkit
from hvdkit.checkpoint import snapshots
from hvdkit.core.seam import Adapter
from hvdkit.data import imagefolder, pictures
from hvdkit.data.batches import evaluation_batches
from hvdkit.errors import RunError
from hvdkit.files import read_bounded, write_atomic
from hvdkit.heartbeat import Heartbeat
from hvdkit.recipe.schema import Recipe
from hvdkit.results.predict_images import Guess, ImagePredictions, Picture
from hvdkit.worker.setup import Script, start


def predict_images(
    adapter: Adapter, script: Script, recipe: Recipe, request: Path, out: Path, heartbeat: Heartbeat
) -> None:
    """Write the `top` most probable classes of `files` by the model of `checkpoint`, which are the keys of the JSON
    file `request`, to `predict-images.json` in the folder `out`.

    Raises RequestError if the checkpoint or a picture cannot be read, RunError if the model's outputs are not finite.
    """
    asked = json.loads(read_bounded(request))  # not by pydantic, which refuses names that are no UTF-8
    files: list[str] = asked["files"]
    found = snapshots.read(Path(asked["checkpoint"]))
    how = pictures.preprocessing(recipe.data, int(recipe.model.classes), found.record.preprocessing)
    setup = start(adapter, script, recipe, pictures.open_pictures(files, recipe.data, how))
    session = setup.session(recipe)
    state, averaged = found.model(asked["average"])
    session.load_state(state)
    answers: list[Picture] = []
    for batch, valid in evaluation_batches(setup.dataset.val, recipe.batch_size, 0, 1):
        heartbeat.beat("prediction")
        for row in _probabilities(session.predict(batch.inputs)[:valid]):
            if not np.isfinite(row).all():
                raise RunError(
                    f"{asked['checkpoint']}: the model's outputs are no numbers: training has run away before"
                )
            best = np.argsort(-row, kind="stable")[: asked["top"]].tolist()
            guesses = [Guess(name=how.class_names[k], label=k, probability=float(row[k])) for k in best]
            answers.append(Picture(file=imagefolder.printable(files[len(answers)]), classes=guesses))
    versions = adapter.versions()
    result = ImagePredictions(
        framework=adapter.NAME,
        framework_version=versions["framework"],
        hvdkit_version=hvdkit.__version__,
        recipe=recipe.name,
        model=recipe.model.name,
        checkpoint=imagefolder.printable(asked["checkpoint"]),
        trained_by=found.record.framework,
        step=found.record.progress.step,
        averaged=averaged,
        pictures=answers,
    )
    write_atomic(out / "predict-images.json", result.model_dump_json(indent=2) + "\n")
    adapter.shutdown()


def _probabilities(logits: np.ndarray) -> np.ndarray:
    """The softmax of each row, (n, classes) float64."""
    shifted = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=1, keepdims=True))
