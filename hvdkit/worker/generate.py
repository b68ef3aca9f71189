"""One rank of `hvdkit generate`: the most probable tokens behind a prompt, by a checkpoint's model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

import hvdkit
from hvdkit.checkpoint import snapshots
from hvdkit.core.seam import Adapter
from hvdkit.data.dataset import Dataset
from hvdkit.data.text import WindowSplit
from hvdkit.errors import RunError
from hvdkit.files import read_bounded, write_atomic
from hvdkit.heartbeat import Heartbeat
from hvdkit.recipe.schema import Recipe
from hvdkit.results.generate import Generation
from hvdkit.tasks.gpt import GPT
from hvdkit.worker.setup import Script, start


def generate(adapter: Adapter, script: Script, recipe: Recipe, request: Path, out: Path, heartbeat: Heartbeat) -> None:
    """Write the `count` tokens that follow `tokens`, by the model of `checkpoint`, which are the keys of the JSON file
    `request`, to `generate.json` in the folder `out`.

    Raises RequestError if the checkpoint cannot be read, RunError if the model's outputs are not finite.
    """
    asked = json.loads(read_bounded(request))
    found = snapshots.read(Path(asked["checkpoint"]))
    nothing = WindowSplit(np.empty(0, np.int64), 1)
    setup = start(adapter, script, recipe, Dataset(nothing, nothing, (), int(recipe.model.classes)))
    table = setup.architecture
    assert isinstance(table, GPT)
    session = setup.session(recipe)
    state, averaged = found.model(asked["average"])
    session.load_state(state)
    tokens: list[int] = asked["tokens"]
    for _ in range(asked["count"]):
        heartbeat.beat("generation")
        seen = tokens[-table.context :]
        # Always as many tokens, as some frameworks compile a model for one shape; none sees those behind it.
        inputs = np.zeros((1, table.context), np.int64)
        inputs[0, : len(seen)] = seen
        logits = session.predict(inputs)[0, len(seen) - 1]
        if not np.isfinite(logits).all():
            raise RunError(f"{asked['checkpoint']}: the model's outputs are no numbers: training has run away before")
        tokens.append(int(logits.argmax()))
    versions = adapter.versions()
    result = Generation(
        framework=adapter.NAME,
        framework_version=versions["framework"],
        hvdkit_version=hvdkit.__version__,
        model=recipe.model.name,
        trained_by=found.record.framework,
        step=found.record.progress.step,
        averaged=averaged,
        tokens=tokens[-asked["count"] :],
    )
    write_atomic(out / "generate.json", result.model_dump_json(indent=2) + "\n")
    adapter.shutdown()
