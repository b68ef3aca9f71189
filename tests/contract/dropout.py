"""Cases of models that draw random numbers: dropout in training alone, other masks on each rank, the same each run."""

from __future__ import annotations

from typing import Any

import numpy as np

from hvdkit.core.session import Session
from hvdkit.errors import RequestError
from hvdkit.recipe.schema import Loss, Sgd
from hvdkit.strategies.dense import Dense
from hvdkit.worker.setup import seed_of
from tests.contract.cases import CLASSES, FEATURES, Adapter, Make, Topology, case, error, features, fresh, group_of

KEPT = 0.75


class Seeded:
    """All that `seed_of` reads of a recipe."""

    seed = 11


def _model(framework: str) -> Any:
    """Dropout of the features, then a linear layer."""
    share = 1 - KEPT
    if framework == "pytorch":
        from torch import nn

        return nn.Sequential(nn.Dropout(share), nn.Linear(FEATURES, CLASSES))
    if framework == "keras":
        import keras

        x = keras.Input((FEATURES,))
        return keras.Model(x, keras.layers.Dense(CLASSES)(keras.layers.Dropout(share)(x)))
    if framework == "mxnet":
        from mxnet.gluon import nn as gluon

        model = gluon.HybridSequential()
        model.add(gluon.Dropout(share), gluon.Dense(CLASSES, in_units=FEATURES))
        return model
    import tensorflow as tf

    class Dropped(tf.Module):
        def __init__(self) -> None:
            self.kernel = tf.Variable(tf.random.normal((FEATURES, CLASSES)), name="fc.kernel")
            self.bias = tf.Variable(tf.zeros(CLASSES), name="fc.bias")

        def __call__(self, x: Any, training: bool) -> Any:
            return (tf.nn.dropout(x, share) if training else x) @ self.kernel + self.bias

    return Dropped()


def _session(adapter: Adapter, topology: Topology) -> Session:
    """As a rank of `hvdkit train` makes it."""
    adapter.seed(seed_of(Seeded, topology.rank))  # type: ignore[arg-type]
    strategy = Dense(adapter, group_of(topology), name=fresh())
    session = Session(adapter, _model(adapter.NAME), Sgd(learning_rate=0.1), Loss(), strategy)
    session.broadcast_state(group_of(topology))
    return session


@case
def dropout_is_for_training_alone(adapter: Adapter, topology: Topology, make: Make) -> None:
    if adapter.NAME == "local":
        return
    session, batch = _session(adapter, topology), features(1, 64)
    weight, bias = (value for name, value in sorted(session.state().items(), reverse=True) if "optimizer" not in name)
    whole = batch.inputs @ weight.T + bias
    once, again = (session.gradients(batch).outputs for _ in range(2))
    for _ in range(2):
        assert error(session.predict(batch.inputs), whole) < 1e-5
    assert error(once, whole) > 0.1 and error(again, once) > 0.1, "a new mask in each step"


@case
def ranks_draw_masks_of_their_own(adapter: Adapter, topology: Topology, make: Make) -> None:
    if adapter.NAME == "local":
        return
    session, batch = _session(adapter, topology), features(1, 64)
    outputs = session.gradients(batch).outputs
    everyone = adapter.allgather_object(outputs.tolist(), group_of(topology), name="masks")
    different = [error(np.array(other), outputs) for rank, other in enumerate(everyone) if rank != topology.rank]
    assert all(each > 0.1 for each in different), different


@case
def the_same_seed_draws_the_same_masks(adapter: Adapter, topology: Topology, make: Make) -> None:
    if adapter.NAME == "local":
        return
    batch = features(1, 64)
    runs = []
    for _ in range(2):
        session = _session(adapter, topology)
        runs.append([session.gradients(batch).outputs for _ in range(3)])
    assert all(np.array_equal(one, other) for one, other in zip(*runs, strict=True))
    # what a run that goes on from step 7 draws, in a process that has drawn before and in a new one
    adapter.seed(seed_of(Seeded, topology.rank, 7))  # type: ignore[arg-type]
    went_on = session.gradients(batch).outputs
    session = _session(adapter, topology)
    adapter.seed(seed_of(Seeded, topology.rank, 7))  # type: ignore[arg-type]
    resumed = session.gradients(batch).outputs
    assert np.array_equal(went_on, resumed) == (adapter.NAME != "tensorflow"), "tf.nn.dropout keeps its first seed"


@case
def a_function_that_backward_computes_again_draws_the_same_masks(
    adapter: Adapter, topology: Topology, make: Make
) -> None:
    """Within a compiled step, and with several alive, as in a pipeline. Other random numbers are refused."""
    if adapter.NAME != "tensorflow":
        return
    import tensorflow as tf

    from hvdkit.adapters.tensorflow.recompute import dropout, recomputed

    x = tf.constant(np.arange(1, 65), tf.float64)
    forward = tf.function(lambda x: recomputed(lambda x: dropout(dropout(x, 0.5), 0.25))(x))

    def passed(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = forward(x)
        return tape, y

    @tf.function
    def step(x: Any) -> Any:
        tape, y = passed(x)
        return y, tape.gradient(y, x)

    alive = [passed(x) for _ in range(2)]
    found = [step(x), *((y, tape.gradient(y, x)) for tape, y in alive)]
    for y, gradient in found:  # of each element the outputs are a multiple, which is its gradient
        assert error(np.array(gradient * x), np.array(y)) < 1e-14 and 0 < np.count_nonzero(y) < 64
    assert not np.array_equal(found[1][0], found[2][0]), "other masks for each microbatch"
    try:
        tf.function(recomputed(lambda x: tf.nn.dropout(x, 0.5)), autograph=False)(x)
        told = ""
    except RequestError as refusal:
        told = str(refusal)
    assert told.startswith("recompute: ") and "would draw other numbers in backward" in told
