"""A checkpoint's model as a `.keras` archive; `hvdkit export CHECKPOINT --out FILE.keras` runs this:

    python recipes/keras/export.py RECIPE.yaml CHECKPOINT FILE.keras

`keras.models.load_model(FILE)` reads it back, with `recipes/keras/resnet.py` imported for its layers.
"""

import sys
from dataclasses import replace
from pathlib import Path

from resnet import build  # of this folder

from hvdkit.checkpoint import snapshots
from hvdkit.core.heartbeat import Heartbeat
from hvdkit.core.precision import PRECISIONS
from hvdkit.core.state import canonical_name, check_fits, from_canonical, model_state, to_canonical
from hvdkit.recipe import schema
from hvdkit.tasks.resnet import architecture
from hvdkit.worker.entry import end_as_rank

import keras  # isort: skip  # after resnet, whose adapter quiets TensorFlow's banner


def restore(recipe: schema.Recipe, state: snapshots.State) -> keras.Model:
    """The recipe's model with the state's weights. Raises RequestError where they do not fit."""
    channels, precision = state["conv1.weight"].shape[1], PRECISIONS[recipe.precision]
    table = architecture(recipe.model.name, recipe.model.classes, channels)
    model = build(replace(table, dtype=precision.parameters, compute_dtype=precision.compute))
    variables = {canonical_name(variable.path): variable for variable in model.variables}
    check_fits({name: to_canonical(variable.numpy()).shape for name, variable in variables.items()}, state)
    for name, variable in variables.items():
        variable.assign(from_canonical(state[name]))
    return model


def export(heartbeat: Heartbeat) -> None:
    """What this process's command line asks for: RECIPE CHECKPOINT FILE.keras."""
    recipe, folder, file = map(Path, sys.argv[1:])
    model = restore(schema.load(recipe), model_state(snapshots.read(folder).state))
    heartbeat.beat("writing the archive")
    model.save(file)


if __name__ == "__main__":
    end_as_rank(export)
