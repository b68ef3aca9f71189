"""Cases of models that are no classifiers: a loss of the user's, targets of any shape and dtype, several inputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hvdkit.core.metrics import evaluate, summed
from hvdkit.core.session import Session
from hvdkit.data.dataset import ArraySplit, Batch
from hvdkit.recipe.schema import Sgd
from hvdkit.strategies.dense import Dense
from hvdkit.tasks.task import Metrics
from tests.contract.cases import FEATURES, Adapter, Make, Topology, case, error, fresh, group_of
from tests.contract.grown import changed
from tests.contract.tiny import two_inputs

ERRORS = Metrics(("squared", "absolute"), lambda y, t: (float(((y - t) ** 2).sum()), float(np.abs(y - t).sum())))


def squared(outputs: Any, targets: Any) -> Any:
    """Half the mean squared error, by operators that every framework has."""
    difference = outputs - targets
    return (difference * difference).mean() / 2 if hasattr(difference, "mean") else _tf_mean(difference) / 2


def _tf_mean(difference: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_mean(difference * difference)


def measured(seed: int, count: int = 8) -> Batch:
    """Two inputs, the second of whole numbers, and a target of shape (n, 3) in float64."""
    random = np.random.default_rng(seed)
    left = random.standard_normal((count, FEATURES)).astype(np.float32)
    right = random.integers(0, 5, (count, 2))
    target = np.stack([left[:, 0] + right[:, 0], left[:, 1] - right[:, 1], left[:, 2]], 1).astype(np.float64)
    return Batch((left, right), target)


@case
def a_loss_of_ones_own_trains_a_network_of_two_inputs(adapter: Adapter, topology: Topology, make: Make) -> None:
    if adapter.NAME == "local":
        return
    model, state = two_inputs(adapter.NAME)
    average = Dense(adapter, group_of(topology), name=fresh())
    session = Session(adapter, model, Sgd(learning_rate=0.1), squared, average, "fp64")
    session.load_state(state)
    mine = measured(topology.rank)
    got = session.gradients(mine)
    left, right = mine.inputs
    hidden = np.concatenate([left, right], 1).astype(np.float64)
    outputs = hidden @ state["fc.weight"].T.astype(np.float64) + state["fc.bias"]
    wrong = (outputs - mine.targets) / mine.targets.size
    assert error(got.outputs, outputs) < 1e-12 and abs(got.loss - (wrong * (outputs - mine.targets)).sum() / 2) < 1e-12
    assert error(got.own["fc.weight"], wrong.T @ hidden) < 1e-12
    before = session.state()
    losses = [float(adapter.to_numpy(session.train_step([measured(topology.rank)])).mean()) for _ in range(30)]
    assert "fc.weight" in changed(before, session.state()) and losses[-1] < 0.2 * losses[0], losses
    whole = measured(99, 11)
    found = evaluate(adapter, session, ERRORS, ArraySplit(whole.inputs, whole.targets), 4, group_of(topology))
    outputs = np.concatenate([session.predict(tuple(each[i : i + 4] for each in whole.inputs)) for i in (0, 4, 8)])
    assert abs(found["squared"] - ((outputs - whole.targets) ** 2).sum() / 11) < 1e-9 * found["squared"]
    assert abs(found["absolute"] - np.abs(outputs - whole.targets).sum() / 11) < 1e-9 * found["absolute"]


@case
def an_evaluation_has_the_same_bits_on_any_number_of_ranks(adapter: Adapter, topology: Topology, make: Make) -> None:
    if adapter.NAME == "local":
        return
    model, state = two_inputs(adapter.NAME)
    average = Dense(adapter, group_of(topology), name=fresh())
    session = Session(adapter, model, Sgd(learning_rate=0.1), squared, average, "fp64")
    session.load_state(state)
    batch = measured(5, 53)
    split = ArraySplit(batch.inputs, batch.targets)
    shared, count = summed(adapter, session, ERRORS, split, 4, group_of(topology))
    alone = replace(group_of(topology), ranks=(0,), index=0, handle=(0,))  # all samples by each rank
    everywhere, counts = summed(adapter, session, ERRORS, split, 4, alone)
    assert (count, counts) == (53, 53)
    assert shared == everywhere
