"""A model with all kinds of tensors that its framework has, in training: numbers (n, 6) below 50 to logits (n, 2)."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdkit.data.batches import ArraySplit
from hvdkit.tasks.own import Own

ROWS, WIDTH = 50, 8
WHOLE = ("bool", "uint8", "int8", "int16", "int32", "int64")
COMPLEX = ("complex64", "complex128")


class Task(Own):
    """Which half of the rows the first number is in. `options.framework` names the model's."""

    def samples(self) -> tuple[ArraySplit, ArraySplit]:
        inputs = np.random.default_rng(5).integers(0, ROWS, (88, 6))
        labels = (inputs[:, 0] > ROWS // 2).astype(np.int64)
        return ArraySplit(inputs[:64], labels[:64]), ArraySplit(inputs[64:], labels[64:])

    def model(self) -> Any:
        made = {"pytorch": _pytorch, "tensorflow": _tensorflow, "keras": _keras, "mxnet": _mxnet}
        return made[self.options["framework"]]()


def constants(dtypes: tuple[str, ...]) -> dict[str, np.ndarray]:
    """A vector of each dtype, whose values no wider rounding keeps: the largest of an integer, thirds."""
    found = {}
    for dtype in dtypes:
        kind = np.dtype(dtype).kind
        if kind == "b":
            found[dtype] = np.arange(WIDTH) % 3 > 0
        elif kind in "iu":
            found[dtype] = (np.iinfo(dtype).max - np.arange(WIDTH)).astype(dtype)
        else:
            found[dtype] = ((1 + np.arange(WIDTH)) / 3 * (1 + 1j if kind == "c" else 1)).astype(dtype)
    return found


def _pytorch() -> Any:
    import torch
    from torch import nn

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.EmbeddingBag(ROWS, WIDTH, sparse=True)
            self.cumulative, self.usual = nn.BatchNorm1d(WIDTH, momentum=None), nn.BatchNorm1d(WIDTH)
            self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
            self.second.weight = self.first.weight
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
            self.lazy = nn.LazyLinear(WIDTH)
            self.lazy(torch.ones(1, WIDTH))
            self.head = torch.compile(nn.Linear(WIDTH, 2), backend="eager")
            self.scale, self.nothing = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(0, 3))
            self.fine = nn.Parameter(torch.full((WIDTH,), 1 / 3, dtype=torch.float64))
            self.rough = nn.Parameter(torch.full((WIDTH,), 1 / 3, dtype=torch.bfloat16))
            self.turned = nn.Parameter(torch.ones(WIDTH, 3).T)  # not contiguous
            found = constants((*WHOLE, *COMPLEX, "float16", "float64")).items()
            buffers = {f"of_{dtype}": torch.from_numpy(values) for dtype, values in found} | {
                "of_bfloat16": torch.ones(WIDTH, dtype=torch.bfloat16) / 3,
                "no_rows": torch.empty(0, 3),
                "seen": torch.tensor(0),
                "large": torch.tensor(0),
                "size": torch.tensor(1.0),
                "phase": torch.zeros(WIDTH, dtype=torch.complex64),
                "third": torch.tensor(1 / 3),
            }
            for name, tensor in buffers.items():
                self.register_buffer(name, tensor)
            self.register_buffer("drawn", torch.randn(WIDTH), persistent=False)

        def forward(self, x: Any) -> Any:
            h = self.words(x)
            if self.training:
                self.seen += len(x)
                self.large += (x > ROWS // 2).sum()
                self.size = 0.9 * self.size + 0.1 * h.detach().abs().mean()  # another tensor in the buffer's place
                self.phase.mul_(0.9).add_(h.detach().mean(0) * (1 + 2j))
            h = self.usual(self.cumulative(h)) * self.of_bool + self.drawn
            h = self.second(torch.relu(self.first(h))) + self.frozen(h) + self.normed(h) + self.lazy(h)
            h = h * self.scale / self.size + self.fine * self.rough + self.turned.sum(0) * self.of_float64
            return self.head(h + (self.of_complex64 * self.phase).real)

    return Odd()


def _tensorflow() -> Any:
    import tensorflow as tf

    class Odd(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            random = tf.random.normal
            trained = {"table": random((ROWS, WIDTH)), "weight": random((WIDTH, WIDTH)), "head": random((WIDTH, 2))}
            trained |= {"scale": 1.0, "nothing": tf.zeros((0, 3)), "seen": tf.constant(0, tf.int64)}
            kept = {"frozen": random((WIDTH, WIDTH)), "large": 0, "size": 1.0, "phase": tf.zeros(WIDTH, tf.complex64)}
            kept |= {"pairs": tf.ones((3, 2), tf.complex128) / 3, "rough": tf.ones((3, 2), tf.bfloat16) / 3}
            kept |= {"no_rows": tf.zeros((0, 3)), "third": 1 / 3}
            for trainable, values in ((True, trained), (False, kept)):
                for name, value in values.items():
                    setattr(self, name, tf.Variable(value, trainable=trainable, name=name))
            self.again = self.weight
            found = constants((*WHOLE, *COMPLEX, "float16", "float64")).items()
            self.kinds = {each: tf.Variable(values, trainable=False, name=f"of_{each}") for each, values in found}

        def __call__(self, x: Any, training: bool) -> Any:
            h = tf.reduce_mean(tf.nn.embedding_lookup(self.table, x), 1)
            if training:
                self.seen.assign_add(tf.shape(x, tf.int64)[0])
                self.large.assign_add(tf.reduce_sum(tf.cast(x > ROWS // 2, tf.int32)))
                self.size.assign(0.9 * self.size + 0.1 * tf.reduce_mean(abs(h)))
                self.phase.assign(self.phase * 0.9 + tf.cast(tf.reduce_mean(h, 0), tf.complex64) * (1 + 2j))
            h = h * tf.cast(self.kinds["bool"], tf.float32) + tf.cast(self.kinds["float64"], tf.float32)
            h = tf.nn.relu(h @ self.weight) @ self.again + h @ self.frozen
            return (h * self.scale / self.size + tf.math.real(self.phase)) @ self.head

    return Odd()


def _keras() -> Any:
    import keras
    import tensorflow as tf

    class State(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__(name="state")
            self.scale = self.add_weight(shape=(), initializer="ones", name="scale")
            self.size = self.kept("size", np.float32(1))
            self.seen = self.kept("seen", np.int64(0))
            kinds = constants((*WHOLE, "float16", "float64"))
            self.kinds = [self.kept(f"of_{dtype}", values) for dtype, values in kinds.items()]
            self.rough = self.kept("rough", np.ones(3), "bfloat16")

        def kept(self, name: str, values: Any, dtype: str = "") -> Any:
            how = {"dtype": dtype or str(values.dtype), "trainable": False, "autocast": False, "name": name}
            start = lambda shape, dtype: tf.cast(tf.constant(values), dtype)  # noqa: E731
            return self.add_weight(shape=values.shape, initializer=start, **how)

        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                self.seen.assign_add(keras.ops.cast(keras.ops.shape(x)[0], "int64"))
                self.size.assign(0.9 * self.size + 0.1 * keras.ops.mean(keras.ops.abs(x)))
            return x * keras.ops.cast(self.kinds[0], "float32") * self.scale / self.size

    keras.backend.clear_session()  # layers of the next model have the same names
    x = keras.Input((6,), dtype="int64")
    h = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(ROWS, WIDTH)(x))
    h = keras.layers.BatchNormalization()(State()(h))
    shared, frozen = keras.layers.Dense(WIDTH), keras.layers.Dense(WIDTH)
    frozen.trainable = False
    return keras.Model(x, keras.layers.Dense(2)(shared(keras.ops.relu(shared(h))) + frozen(h)))


def _mxnet() -> Any:
    from mxnet import gluon, nd

    class Odd(gluon.HybridBlock):
        def __init__(self) -> None:
            super().__init__()
            with self.name_scope():
                self.words = gluon.nn.Embedding(ROWS, WIDTH, sparse_grad=True)
                self.norm = gluon.nn.BatchNorm(in_channels=WIDTH)
                self.first = gluon.nn.Dense(WIDTH, in_units=WIDTH, use_bias=False)
                self.second = gluon.nn.Dense(WIDTH, in_units=WIDTH, use_bias=False, params=self.first.params)
                self.frozen = gluon.nn.Dense(WIDTH, in_units=WIDTH)
                self.frozen.collect_params().setattr("grad_req", "null")
                self.head = gluon.nn.Dense(2, in_units=WIDTH)
                self.rough = self.params.get("rough", shape=(WIDTH,), dtype="float16", init="ones")
                self.mask = self.params.get_constant("mask", nd.array([1, 0] * (WIDTH // 2)))
                kinds = constants(("bool", "uint8", "int8", "int32", "int64", "float64"))
                for dtype, values in kinds.items():
                    setattr(self, f"of_{dtype}", self.params.get_constant(f"of_{dtype}", nd.array(values, dtype=dtype)))

        def hybrid_forward(self, F: Any, x: Any, rough: Any, mask: Any, **others: Any) -> Any:
            h = self.norm(F.broadcast_mul(F.mean(self.words(x), axis=1), mask.expand_dims(0)))
            h = self.second(F.relu(self.first(h))) + self.frozen(h)
            return self.head(F.broadcast_mul(h, rough.expand_dims(0)))

    return Odd()


def refused(framework: str) -> dict[str, Any]:
    """Functions that make a model which cannot be trained, by what is wrong with it."""
    return {"pytorch": _refused_pytorch, "tensorflow": _refused_tensorflow, "keras": _refused_keras}.get(
        framework, _refused_mxnet
    )()


def _refused_pytorch() -> dict[str, Any]:
    import torch
    from torch import nn

    def with_buffer(buffer: Any) -> Any:
        model = nn.Linear(6, 2)
        model.register_buffer("odd", buffer)
        return model

    class Spectrum(nn.Linear):
        def forward(self, x: Any) -> Any:
            return torch.fft.rfft(super().forward(x.float()))

    return {
        "complex parameter": lambda: nn.Linear(6, 2, dtype=torch.complex64),
        "lazy parameter": lambda: nn.LazyLinear(2),
        "without values": lambda: nn.Linear(6, 2, device="meta"),
        "sparse buffer": lambda: with_buffer(torch.eye(3).to_sparse()),
        "complex outputs": lambda: Spectrum(6, 2),
    }


def _refused_tensorflow() -> dict[str, Any]:
    import tensorflow as tf

    class Model(tf.Module):
        def __init__(self, **others: Any) -> None:
            super().__init__()
            self.weight = tf.Variable(tf.ones((6, 2)), name="weight")
            self.others = {name: tf.Variable(value, name=name) for name, value in others.items()}

        def __call__(self, x: Any, training: bool) -> Any:
            return tf.cast(x, tf.float32) @ self.weight

    class Late(Model):
        def __call__(self, x: Any, training: bool) -> Any:
            if not hasattr(self, "late"):
                self.late = tf.Variable(tf.ones(2), name="late")
            return super().__call__(x, training) * self.late

    class Spectrum(Model):
        def __call__(self, x: Any, training: bool) -> Any:
            return tf.signal.rfft(super().__call__(x, training))

    def shapeless() -> Any:
        model = Model()
        model.odd = tf.Variable(tf.ones(3), shape=tf.TensorShape(None), trainable=False, name="odd")
        return model

    return {
        "complex parameter": lambda: Model(odd=tf.ones(2, tf.complex64)),
        "float64 parameter": lambda: Model(odd=tf.ones(2, tf.float64)),
        "text": lambda: Model(odd="text"),
        "without shape": shapeless,
        "made when called": Late,
        "complex outputs": Spectrum,
    }


def _refused_keras() -> dict[str, Any]:
    import keras

    class Late(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(2)
            self.first.build((None, 6))

        def call(self, x: Any) -> Any:
            return self.second(self.first(x))

    class Whole(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first = keras.layers.Dense(2)
            self.first.build((None, 6))
            self.odd = self.add_weight(shape=(2,), dtype="int32", initializer="zeros", name="odd")

    return {"made when called": Late, "integer parameter": Whole}


def _refused_mxnet() -> dict[str, Any]:
    from mxnet import gluon

    def with_parameter(**settings: Any) -> Any:
        model = gluon.nn.Dense(2, in_units=6)
        model.odd = model.params.get("odd", shape=(2,), **settings)
        return model

    return {
        "integer parameter": lambda: with_parameter(dtype="int32"),
        "sparse parameter": lambda: with_parameter(stype="row_sparse"),
        "lazy parameter": lambda: gluon.nn.Dense(2),
    }
