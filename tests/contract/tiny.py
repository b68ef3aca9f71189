"""Two dense layers in each framework, without batch norm and soon compiled: features (n, 12) to logits (n, 10)."""

from __future__ import annotations

from typing import Any

import numpy as np
from cases import CLASSES, FEATURES

HIDDEN = 8


def tiny_network(framework: str, dtype: str) -> Any:
    """In the dtype given, where the framework's adapter does not cast the network itself."""
    return {"pytorch": _pytorch, "tensorflow": _tensorflow, "keras": _keras, "mxnet": _mxnet}[framework](dtype)


def tiny_state() -> dict[str, np.ndarray]:
    """What it starts from; a bias of zeros is among it, for optimizers that look at norms."""
    random = np.random.default_rng(5)
    return {
        "hidden.weight": random.standard_normal((HIDDEN, FEATURES)).astype(np.float32),
        "hidden.bias": np.zeros(HIDDEN, np.float32),
        "fc.weight": random.standard_normal((CLASSES, HIDDEN)).astype(np.float32),
        "fc.bias": random.standard_normal(CLASSES).astype(np.float32),
    }


def _pytorch(dtype: str) -> Any:
    from collections import OrderedDict

    from torch import nn

    layers = {"hidden": nn.Linear(FEATURES, HIDDEN), "relu": nn.ReLU(), "fc": nn.Linear(HIDDEN, CLASSES)}
    return nn.Sequential(OrderedDict(layers))


def _tensorflow(dtype: str) -> Any:
    import tensorflow as tf

    class Tiny(tf.Module):
        def __init__(self) -> None:
            shapes = {"hidden": (FEATURES, HIDDEN), "fc": (HIDDEN, CLASSES)}
            self.kernels = {
                name: tf.Variable(tf.zeros(shape, dtype), name=f"{name}.kernel") for name, shape in shapes.items()
            }
            self.biases = {
                name: tf.Variable(tf.zeros(shape[1], dtype), name=f"{name}.bias") for name, shape in shapes.items()
            }

        def __call__(self, x: Any, training: bool) -> Any:
            x = tf.nn.relu(x @ self.kernels["hidden"] + self.biases["hidden"])
            return x @ self.kernels["fc"] + self.biases["fc"]

    return Tiny()


def _keras(dtype: str) -> Any:
    import keras

    x = keras.Input((FEATURES,), dtype=dtype)
    y = keras.layers.Dense(HIDDEN, "relu", name="hidden", dtype=dtype)(x)
    return keras.Model(x, keras.layers.Dense(CLASSES, name="fc", dtype=dtype)(y))


def _mxnet(dtype: str) -> Any:
    from mxnet.gluon import nn

    class Tiny(nn.HybridBlock):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Dense(HIDDEN, activation="relu", in_units=FEATURES)
            self.fc = nn.Dense(CLASSES, in_units=HIDDEN)

        def hybrid_forward(self, F: Any, x: Any) -> Any:
            return self.fc(self.hidden(x))

    return Tiny()
