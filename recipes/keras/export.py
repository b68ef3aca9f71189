"""A model of Keras's own layers as a `.keras` archive; `hvdkit export CHECKPOINT --out FILE.keras` runs this:

    python recipes/keras/export.py RECIPE.yaml WEIGHTS.safetensors FILE.keras

`keras.saving.load_model(FILE)` reads it back, without hvdkit. The weights' metadata has the architecture's `table`.
"""

import json
import sys
from types import SimpleNamespace

from safetensors import safe_open

import hvdkit.adapters.keras  # noqa: F401 - before Keras, as it quiets TensorFlow's banner
from hvdkit.core.state import canonical_name, from_canonical
from hvdkit.heartbeat import Heartbeat
from hvdkit.worker.entry import end_as_rank

import keras  # isort: skip
from keras import layers  # isort: skip


def build(table) -> keras.Model:
    """A model from images (n, height, width, channels) to logits (n, classes).

    Its layers have the table's names with `_` for each dot, which Keras on PyTorch does not take. In evaluation it
    computes what the model of `resnet.py` does. Where it is trained further, Keras's batch norm keeps a biased
    running variance.
    """

    def normalized(prefix, row, x):
        conv, norm = ((prefix + name).replace(".", "_") for name in (row.name, row.norm))
        if row.stride > 1 and row.kernel > 1:  # "same" would pad less before than after
            x = layers.ZeroPadding2D(row.kernel // 2)(x)
        padding = "same" if row.stride == 1 else "valid"
        x = layers.Conv2D(row.outputs, row.kernel, row.stride, padding, use_bias=False, name=conv)(x)
        return layers.BatchNormalization(momentum=table.norm_momentum, epsilon=table.norm_epsilon, name=norm)(x)

    keras.config.set_dtype_policy(table.dtype)
    images = keras.Input((None, None, table.stem.inputs), name="images")
    x = layers.ReLU()(normalized("", table.stem, images))
    if table.max_pool:  # after a ReLU, padding with zeros is the same as with minus infinity
        x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D(1)(x))
    for block in table.blocks:
        prefix, y = f"{block.name}.", x
        for index, row in enumerate(block.convs):
            y = normalized(prefix, row, layers.ReLU()(y) if index else y)
        shortcut = normalized(prefix, block.projection, x) if block.projection else x
        x = layers.ReLU()(layers.Add()([y, shortcut]))
    logits = layers.Dense(table.classes, name="fc")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(images, logits, name=table.name)


def export(heartbeat: Heartbeat) -> None:
    """What this process's command line asks for: RECIPE WEIGHTS FILE.keras."""
    _, weights, file = sys.argv[1:]
    with safe_open(weights, "np") as opened:
        table = json.loads(opened.metadata()["table"], object_hook=lambda fields: SimpleNamespace(**fields))
        model = build(table)
        for layer in model.layers:
            for variable in layer.variables:
                name = canonical_name(f"{layer.name.replace('_', '.')}.{variable.name}")
                variable.assign(from_canonical(opened.get_tensor(name)))
    heartbeat.beat("writing the archive")
    model.save(file)


if __name__ == "__main__":
    end_as_rank(export)
