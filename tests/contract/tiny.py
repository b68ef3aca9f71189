"""Two dense layers in each framework, without batch norm and soon compiled: features (n, 12) to logits (n, 10)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.contract.cases import CLASSES, FEATURES

HIDDEN = 8


def tiny_network(framework: str, dtype: str) -> Any:
    """In the dtype given, where the framework's adapter does not cast the model itself."""
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


def two_inputs(framework: str) -> tuple[Any, dict[str, np.ndarray]]:
    """A linear layer over features (n, 12) and whole numbers (n, 2), in float64, and weights for it."""
    random = np.random.default_rng(7)
    weight = random.standard_normal((3, FEATURES + 2)).astype(np.float32)
    makers = {"pytorch": _two_pytorch, "tensorflow": _two_tensorflow, "keras": _two_keras, "mxnet": _two_mxnet}
    return makers[framework](), {"fc.weight": weight, "fc.bias": np.zeros(3, np.float32)}


def _two_pytorch() -> Any:
    import torch

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(FEATURES + 2, 3)

        def forward(self, left: Any, right: Any) -> Any:
            return self.fc(torch.cat([left, right.to(left.dtype)], 1))

    return Two()


def _two_tensorflow() -> Any:
    import tensorflow as tf

    class Two(tf.Module):
        def __init__(self) -> None:
            self.kernel = tf.Variable(tf.zeros((FEATURES + 2, 3), "float64"), name="fc.kernel")
            self.bias = tf.Variable(tf.zeros(3, "float64"), name="fc.bias")

        def __call__(self, left: Any, right: Any, training: bool) -> Any:
            return tf.concat([left, tf.cast(right, left.dtype)], 1) @ self.kernel + self.bias

    return Two()


def _two_keras() -> Any:
    import keras

    left, right = keras.Input((FEATURES,), dtype="float64"), keras.Input((2,), dtype="int64")
    joined = keras.ops.concatenate([left, keras.ops.cast(right, "float64")], 1)
    return keras.Model([left, right], keras.layers.Dense(3, name="fc", dtype="float64")(joined))


def _two_mxnet() -> Any:
    from mxnet.gluon import nn

    class Two(nn.HybridBlock):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Dense(3, in_units=FEATURES + 2)

        def hybrid_forward(self, F: Any, left: Any, right: Any) -> Any:
            return self.fc(F.concat(left, F.cast(right, "float64"), dim=1))

    return Two()
