"""Whoever brings a framework writes what is its own, and core trains with it."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest

from hvdkit.core.group import world_of
from hvdkit.core.seam import Adapter
from hvdkit.core.session import Session
from hvdkit.core.trainable import Trainable
from hvdkit.data.dataset import Batch
from hvdkit.recipe.schema import AdamW, Lamb, Loss, Sgd
from hvdkit.strategies.dense import Dense
from tests.numpy_adapter import InTraining, Network, NumpyAdapter, cross_entropies

FEATURES, HIDDEN, CLASSES = 6, 8, 3


def batch(step: int) -> Batch:
    random = np.random.default_rng(step)
    inputs = random.standard_normal((16, FEATURES))
    return Batch(inputs, (inputs @ np.random.default_rng(99).standard_normal((FEATURES, CLASSES))).argmax(1))


def session_of(network: Network, optimizer: Sgd | AdamW | Lamb) -> Session:
    adapter = NumpyAdapter()
    world = world_of(adapter.init("cpu"))
    return Session(adapter, network, optimizer, Loss(), Dense(adapter, world), "fp64")


def test_it_trains_by_the_same_arithmetic() -> None:
    """SGD with momentum and weight decay, over one or two microbatches, written out."""
    settings = Sgd(learning_rate=0.1, momentum=0.9, weight_decay=1e-3, decay="weights")
    session, plain = session_of(Network(FEATURES, HIDDEN, CLASSES), settings), Network(FEATURES, HIDDEN, CLASSES)
    velocities = {name: np.zeros_like(value) for name, value in plain.parameters.items()}
    losses = []
    for step in range(60):
        batches = [batch(2 * step + part) for part in range(1 + step % 2)]
        gradients = []
        for each in batches:
            hidden, logits = plain.forward(each.inputs)
            shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            error = (shares - np.eye(CLASSES)[each.targets]) / len(each.targets)
            gradients.append(plain.backward(each.inputs, hidden, error))
        loss = np.mean([cross_entropies(plain.forward(each.inputs)[1], each.targets).mean() for each in batches])
        for name, value in plain.parameters.items():
            mean = sum(each[name] for each in gradients) / len(gradients)
            decay = 1e-3 if value.ndim > 1 else 0.0
            velocities[name] = 0.9 * velocities[name] + mean + decay * value
            value -= 0.1 * velocities[name]
        losses.append(float(np.mean(session.train_step(batches))))
        assert losses[-1] == pytest.approx(loss, rel=1e-9)
    state = session.state()
    for name, value in plain.parameters.items():
        assert np.allclose(state[name], value, rtol=0, atol=1e-9), name
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    assert (session.predict(batch(1000).inputs).argmax(1) == batch(1000).targets).mean() > 0.8


@pytest.mark.parametrize("optimizer", [AdamW(learning_rate=0.01, clip_norm=1.0), Lamb(learning_rate=0.01)])
def test_its_state_comes_back(optimizer: AdamW | Lamb) -> None:
    whole = session_of(Network(FEATURES, HIDDEN, CLASSES), optimizer)
    whole.train_step([batch(0)])
    resumed = session_of(Network(FEATURES, HIDDEN, CLASSES, seed=1), optimizer)
    resumed.load_state(whole.state())
    for session in (whole, resumed):
        session.train_step([batch(1), batch(2)])
    ours, theirs = whole.state(), resumed.state()
    assert ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_what_it_says_itself() -> None:
    def own(kind: type, base: type) -> set[str]:
        return {name for name in vars(kind) if name[0] != "_" and hasattr(base, name)}

    assert own(NumpyAdapter, Adapter) == {"CAPABILITIES", "from_numpy", "norm", "where", "concat", "bind"}
    assert own(InTraining, Trainable) == {"inputs", "backward", "predict", "losses"}
    for base, kind in ((Adapter, NumpyAdapter), (Trainable, InTraining)):
        assert base.__abstractmethods__ <= own(kind, base)  # what has no default
    source = Path(__file__).with_name("numpy_adapter.py").read_text()
    assert len(source.splitlines()) <= 150
    imported = {node.module for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)}
    assert not any("hvdkit.adapters" in str(module) for module in imported)
