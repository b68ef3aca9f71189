"""Parameters that some ranks do not use, or none: DistributedDataParallel needs `find_unused_parameters` for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdkit.core.session import Session
from hvdkit.recipe.schema import AverageWeights, Loss, Sgd
from hvdkit.strategies.dense import Dense
from tests.contract.cases import CLASSES, FEATURES, Adapter, Make, Topology, case, error, features, fresh, group_of

LAYERS = ("fc", "side", "idle")
RATE, DECAY = 0.1, 0.5


def _model(framework: str, used: tuple[str, ...]) -> Any:
    """The sum of the linear layers that are `used`, of all LAYERS."""
    return {"pytorch": _pytorch, "tensorflow": _tensorflow, "keras": _keras, "mxnet": _mxnet}[framework](used)


def _pytorch(used: tuple[str, ...]) -> Any:
    from torch import nn

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name in LAYERS:
                setattr(self, name, nn.Linear(FEATURES, CLASSES))

        def forward(self, x: Any) -> Any:
            return sum(getattr(self, name)(x) for name in used)

    return Branches()


def _tensorflow(used: tuple[str, ...]) -> Any:
    import tensorflow as tf

    class Branches(tf.Module):
        def __init__(self) -> None:
            draw = tf.random.normal
            self.kernels = {name: tf.Variable(draw((FEATURES, CLASSES)), name=f"{name}.kernel") for name in LAYERS}
            self.biases = {name: tf.Variable(tf.ones(CLASSES), name=f"{name}.bias") for name in LAYERS}

        def __call__(self, x: Any, training: bool) -> Any:
            return tf.add_n([x @ self.kernels[name] + self.biases[name] for name in used])

    return Branches()


def _keras(used: tuple[str, ...]) -> Any:
    import keras

    class Branches(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            for name in LAYERS:
                layer = keras.layers.Dense(CLASSES, name=name)
                layer.build((None, FEATURES))
                setattr(self, name, layer)
            self.built = True

        def call(self, x: Any, training: bool = False) -> Any:
            return sum(getattr(self, name)(x) for name in used)

    return Branches()


def _mxnet(used: tuple[str, ...]) -> Any:
    from mxnet.gluon import nn

    class Branches(nn.HybridBlock):
        def __init__(self) -> None:
            super().__init__()
            for name in LAYERS:
                setattr(self, name, nn.Dense(CLASSES, in_units=FEATURES))

        def hybrid_forward(self, F: Any, x: Any) -> Any:
            return sum(getattr(self, name)(x) for name in used)

    return Branches()


@case
def a_parameter_that_a_rank_does_not_use_has_a_gradient_of_zeros_there(
    adapter: Adapter, topology: Topology, make: Make
) -> None:
    if adapter.NAME == "local":
        return
    used = LAYERS[:2] if topology.rank == 0 else LAYERS[:1]
    settings = Sgd(learning_rate=RATE, momentum=0.0, weight_decay=DECAY)
    session = Session(
        adapter, _model(adapter.NAME, used), settings, Loss(), Dense(adapter, group_of(topology), name=fresh())
    )
    session.broadcast_state(group_of(topology))
    mine = features(topology.rank, 8)
    got = session.gradients(mine)
    everyone = adapter.allgather_object(
        {name: value.tolist() for name, value in got.own.items()}, group_of(topology), name="branches"
    )
    means = {name: np.mean([np.array(each[name]) for each in everyone], axis=0) for name in got.own}
    of = {layer: next(name for name in means if layer in name and name.endswith("weight")) for layer in LAYERS}
    assert np.any(got.own[of["side"]]) == (topology.rank == 0) and np.any(means[of["side"]])
    assert not np.any(got.own[of["idle"]])
    before = session.state()
    session.train_step([mine])
    after = session.state()
    for name, mean in means.items():
        assert error(got.averaged[name], mean) < 1e-6 or not np.any(mean), name
        expected = before[name] - RATE * (mean + DECAY * before[name])  # decay acts on what nobody uses, too
        assert error(after[name], expected) < 1e-6, name
    assert error(after[of["idle"]], (1 - RATE * DECAY) * before[of["idle"]]) < 1e-6


@case
def constraints_hold_after_each_update_and_the_average_is_of_what_they_leave(
    adapter: Adapter, topology: Topology, make: Make
) -> None:
    if adapter.NAME != "keras":
        return
    import keras

    x = keras.Input((FEATURES,))
    model = keras.Model(x, keras.layers.Dense(CLASSES, name="fc", kernel_constraint="non_neg")(x))
    dense = Dense(adapter, group_of(topology), name=fresh())
    session = Session(adapter, model, Sgd(learning_rate=1.0), Loss(), dense)
    session.broadcast_state(group_of(topology))
    session.keep_average(AverageWeights(decay=0.5))
    mine = [features(topology.rank), features(topology.rank + 9)]
    by_hand = None
    for batches in (mine, mine[:1], mine):  # accumulated and single ones
        session.train_step(batches)
        state = session.state()
        weight = state["fc.weight"]
        assert weight.min() == 0 < weight.max()
        by_hand = weight if by_hand is None else (by_hand + weight) / 2
        assert error(state["optimizer.average.fc.weight"], by_hand) < 1e-6
    with session.averaged():
        assert error(session.state()["fc.weight"], by_hand) < 1e-6
    assert np.array_equal(session.state()["fc.weight"], weight)
