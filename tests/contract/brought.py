"""Cases of what users bring: samples of any dtype and layout, and a look at the first step that changes nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdkit.core.session import Session
from hvdkit.data.dataset import Batch
from hvdkit.recipe.schema import Loss, Sgd
from hvdkit.strategies.dense import Dense
from hvdkit.worker.sanity_check import rehearse
from tests.contract.cases import CLASSES, FEATURES, Adapter, Make, Topology, case, features, fresh, group_of, same

DRAWS = 3  # the share of outputs that dropout leaves out is 1 / 3


@case
def samples_of_any_dtype_and_layout_make_the_same_gradients(adapter: Adapter, topology: Topology, make: Make) -> None:
    if adapter.NAME == "local":
        return
    session, plain = make(tiny=True), features(1)
    x, y = plain.inputs.astype(np.float16).astype(np.float32), plain.targets
    frozen = x.copy()
    frozen.flags.writeable = False
    inputs = {
        "big-endian": x.astype(">f4"), "reversed": x[:, ::-1].copy()[:, ::-1], "every second": x.repeat(2, 1)[:, ::2],
        "Fortran": np.asfortranarray(x), "read-only": frozen, "half": x.astype(np.float16), "double": x.astype(float),
        "long double": x.astype(np.longdouble), "a list": x.tolist(), "a tensor": adapter.from_numpy(x),
    }  # fmt: skip
    targets = {kind: y.astype(kind) for kind in ("int8", "int16", ">i4", "int32", "uint8", "uint16", ">u4", "uint64")}
    targets |= {"a list": y.tolist(), "a tensor": adapter.from_numpy(y), "every second": y.repeat(2)[::2]}
    expected = session.gradients(Batch(x, y))
    for name, batch in {**{name: Batch(each, y) for name, each in inputs.items()},
                        **{f"targets {name}": Batch(x, each) for name, each in targets.items()}}.items():  # fmt: skip
        got = session.gradients(batch)
        assert all(same(got.own[each], expected.own[each]) for each in expected.own), name
        assert np.array_equal(session.predict(batch.inputs), session.predict(x)), name


@case
def a_rehearsal_changes_nothing(adapter: Adapter, topology: Topology, make: Make) -> None:
    group = group_of(topology)
    if adapter.NAME == "local":
        return
    outcomes = []
    for rehearses in (False, True):
        adapter.seed(5 + topology.rank)
        session = Session(
            adapter, _model(adapter.NAME), Sgd(learning_rate=0.1), Loss(), Dense(adapter, group, name=fresh())
        )
        state = session.state()
        random = np.random.default_rng(2)
        session.load_state(
            {name: random.uniform(0.5, 1, each.shape).astype(each.dtype) for name, each in state.items()}
        )
        np.random.seed(9)
        if rehearses:
            before = session.state()
            rehearse(session, features(3))
            after = session.state()
            assert all(same(before[name], after[name]) for name in before)
        if adapter.NAME == "mxnet":  # the state of its generator cannot be read
            adapter.seed(7)
        for seed in (1, 4):
            session.train_step([features(seed)])
        outcomes.append(session.state() | {"drawn": np.random.random(3)})
    one, other = outcomes
    assert all(same(one[name], other[name]) for name in one), [name for name in one if not same(one[name], other[name])]


def _model(framework: str) -> Any:
    """A linear layer, a batch norm, dropout."""
    return {"pytorch": _pytorch, "tensorflow": _tensorflow, "keras": _keras, "mxnet": _mxnet}[framework]()


def _pytorch() -> Any:
    """It also keeps a count and a mean as plain attributes, and a table from its first call."""
    import torch
    from torch import nn

    class Kept(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("passes", torch.zeros(1), persistent=False)
            self.calls, self.mean, self.table = 0, torch.zeros(CLASSES), None

        def forward(self, x: Any) -> Any:
            if self.table is None:
                self.table = torch.linspace(0, 1, CLASSES)
            if self.training:
                self.passes += 1
                self.calls += 1
                self.mean = 0.9 * self.mean + x.detach().mean(0)
            return x * (1 + self.table) + self.mean + self.passes + self.calls

    return nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES), nn.Dropout(1 / DRAWS), Kept())


def _tensorflow() -> Any:
    import tensorflow as tf

    class Normed(tf.Module):
        def __init__(self) -> None:
            self.kernel = tf.Variable(tf.zeros((FEATURES, CLASSES)), name="fc.kernel")
            self.mean = tf.Variable(tf.zeros(CLASSES), trainable=False, name="mean")

        def __call__(self, x: Any, training: bool) -> Any:
            y = x @ self.kernel
            if not training:
                return y - self.mean
            mean = tf.reduce_mean(y, 0)
            self.mean.assign(0.9 * self.mean + 0.1 * mean)
            return tf.nn.dropout(y - mean, 1 / DRAWS)

    return Normed()


def _keras() -> Any:
    import keras

    x = keras.Input((FEATURES,))
    y = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(CLASSES, name="fc")(x))
    return keras.Model(x, keras.layers.Dropout(1 / DRAWS)(y))


def _mxnet() -> Any:
    from mxnet.gluon import nn

    model = nn.HybridSequential()
    model.add(nn.Dense(CLASSES, in_units=FEATURES), nn.BatchNorm(in_channels=CLASSES), nn.Dropout(1 / DRAWS))
    return model
